"""Streams that record what they wait for."""

from contextlib import contextmanager


class Stream:
    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def wait_stream(self, other):
        self.seen.append(f"{self.name} waits for {other.name}")


class Streams:
    """An accelerator whose streams record what they wait for."""

    def __init__(self):
        self.seen = []
        self.current = Stream("compute", self.seen)

    def is_synchronized_device(self):
        return False

    def resolves_data_dependency(self):
        return False

    def current_device_name(self):
        return "cpu"

    def current_stream(self):
        return self.current

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
