"""Answers that are drawn a rollout ahead (`rollouts.lag`), while others are trained on."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import define, field

from rlhf.trainer import Sample

FILE = "ahead.json"
"""The answers of the next rollout in a checkpoint: its weights could not draw them again."""


@define
class Ahead:
    """The answers of later rollouts. No method of the engine is called while it writes some."""

    _write: Callable[..., Callable[[], list[Sample]]]
    """Has the engine write answers; the result waits for them."""
    drawn: dict[tuple[int, ...], list[Sample]] = field(factory=dict, init=False)
    """Those that are there, by their seeds."""
    writing: tuple[Sequence[int], int, Callable[[], list[Sample]]] | None = field(
        default=None, init=False
    )

    def begin(self, step: int, seeds: Sequence[int], **how: Any) -> None:
        """Have answers written with the weights after `step` steps, those of now. Collective."""
        self.finish()
        self.writing = seeds, step, self._write(seeds=seeds, **how)

    def finish(self) -> None:
        """Wait for the answers that are being written. Raises the error of an engine that could not
        write them. Collective."""
        writing, self.writing = self.writing, None
        if writing is not None:
            seeds, step, wait = writing
            self.drawn[tuple(seeds)] = [attrs.evolve(it, version=step) for it in wait()]

    def take(self, seeds: Sequence[int]) -> list[Sample] | None:
        """Return the answers with these seeds. None if there are none: then the engine can write
        them. Collective."""
        if tuple(seeds) not in self.drawn:
            self.finish()
        return self.drawn.pop(tuple(seeds), None)

    def save(self, folder: Path) -> list[Path]:
        """Write what is there after `finish`; return the file, if any."""
        if not self.drawn:
            return []
        text = json.dumps([*self.drawn.items()], default=lambda it: attrs.asdict(it, recurse=False))
        (folder / FILE).write_text(text, encoding="utf-8")
        return [folder / FILE]

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        if (folder / FILE).exists():
            for seeds, samples in json.loads((folder / FILE).read_text(encoding="utf-8")):
                self.drawn[tuple(seeds)] = [Sample(**sample) for sample in samples]
