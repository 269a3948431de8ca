"""Streams that tell whom they wait for."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace


class Stream:
    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def wait_stream(self, other):
        self.seen.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.seen.append(f"{self.name} waits for bucket {event.number}")


class Streams:
    """An accelerator whose streams tell whom they wait for."""

    def __init__(self):
        self.seen = []
        self.current = Stream("compute", self.seen)
        self.events = 0
        self.Stream = partial(Stream, "weights", self.seen)
        self.Event = self.event

    def is_synchronized_device(self):
        return False

    def resolves_data_dependency(self):
        return False

    def current_device_name(self):
        return "cpu"

    def current_stream(self):
        return self.current

    def event(self):
        number, self.events = self.events, self.events + 1
        return SimpleNamespace(number=number, record=partial(self.record, number))

    def record(self, number):
        self.seen.append(f"bucket {number} sent on {self.current.name}")

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream or self.current
        yield
        self.current = before


def seen_by(accelerator, *acts):
    """What streams did in each of the acts."""
    found = []
    for act in acts:
        accelerator.seen.clear()
        act()
        found.append(list(accelerator.seen))
    return found
