"""The answers of a rollout, and how they are divided into calls of reward functions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from attrs import frozen

from rlhf.errors import counted
from rlhf_rollouts.rewards.functions import Call, shown
from rlhf_rollouts.rewards.rules import text_of

ANSWERS_PER_CALL = 64
"""Whole prompts are scored together, with at most so many answers unless one prompt has more. It
does not depend on the number of workers, so that scores do not."""


@frozen
class Answers:
    """One entry per answer; those of a prompt are neighbours."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]
    rows: Sequence[str] = ()
    """Where the row of each answer came from, if it is known."""

    def matching(self, when: Mapping[str, Any]) -> list[int]:
        """Return the places of the answers whose columns have these values."""
        wanted = {
            name: value if isinstance(value, list | tuple) else [value]
            for name, value in when.items()
        }
        return [
            place
            for place in range(len(self.completions))
            if all(self.columns[name][place] in values for name, values in wanted.items())
        ]

    def by_prompt(self, places: Iterable[int]) -> list[list[int]]:
        """Return neighbours with the same prompt as one list each."""
        return [[*group] for _, group in groupby(places, lambda place: self.prompts[place])]

    def parts(self, places: Iterable[int]) -> Iterator[list[int]]:
        """Yield the places of each call."""
        part: list[int] = []
        for group in self.by_prompt(places):
            if part and len(part) + len(group) > ANSWERS_PER_CALL:
                yield part
                part = []
            part = part + group
        if part:
            yield part

    def call(self, function: int, places: Sequence[int]) -> Call:
        """Return the call that scores the answers at `places`."""

        def chosen(values: Sequence[Any]) -> list[Any]:
            return [values[place] for place in places]

        columns = {name: chosen(values) for name, values in self.columns.items()}
        texts = chosen(self.prompts), chosen(self.completions), chosen(self.completion_ids)
        return Call(function, places, *texts, columns)

    def name(self, place: int) -> str:
        """Return what errors call an answer."""
        answer = shown(text_of(self.completions[place]))
        return f"answer {place + 1} of {len(self.completions)} ({answer} to {self._prompt(place)})"

    def names(self, places: Sequence[int]) -> str:
        """Return what errors call the answers of a call."""
        first = "" if len(self.by_prompt(places)) == 1 else ", the first"
        return f"{counted(len(places), 'answer')}{first} to {self._prompt(places[0])}"

    def _prompt(self, place: int) -> str:
        row = f" in {self.rows[place]}" if self.rows else ""
        return shown(text_of(self.prompts[place])) + row
