"""Answers that another run has recorded, in place of new ones."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from rlhf.engine import Engine, Mesh
from rlhf.errors import RLHFError, counted
from rlhf.hookspecs import BackendHooks
from rlhf.plugin import Config
from rlhf.rollouts import ROLLOUTS, RolloutEngine, find_engine, load_engine
from rlhf.trainer import Sample
from rlhf_rollouts.files import STOP, digest_of, images_of, read_columns, recorded
from rlhf_rollouts.written import first_turns, spans_of

Drawn = tuple[NDArray[np.int32], NDArray[np.float32], bool, int | None]
"""Token ids of an answer, their log-probabilities, whether it has ended itself, and the version of
the weights that wrote it, if it is known."""
READ = ("prompt", "tokens", "logprobs", "finish", "version", "images")
SHOWN = 60
"""Characters of a prompt in an error."""


@define(kw_only=True, eq=False)
class Recorded:
    """Finds the answers that a run has recorded by the seeds of their draws, which belong to an
    epoch, a row and a number of an answer. Only models in training replay: evaluations write new
    answers, by the engine of the configuration."""

    config: Config
    tokenizer: Any
    mesh: Mesh
    hooks: BackendHooks
    notes: list[str] = field(factory=list, init=False)
    """Lines of the engine that writes the answers of evaluations, for the run to print."""
    _read: tuple[Path, Any] | None = field(default=None, init=False)
    """The file that was read last, and its columns."""

    def sample(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int],
        max_new_tokens: int,
        max_tokens: int,
        ends: Sequence[int],
        temperature: float,
        inputs: Sequence[Mapping[str, Any]] = (),
    ) -> list[Sample]:
        """See `rlhf.rollouts.RolloutEngine`. Raises RLHFError if an answer was not recorded, or is
        longer than it may be."""
        if not engine.module.training:
            more = {"inputs": inputs} if inputs else {}
            answers = self._writer.sample(
                engine, prompts, seeds=seeds, max_new_tokens=max_new_tokens, max_tokens=max_tokens,
                ends=ends, temperature=temperature, **more,
            )  # fmt: skip
            notes: list[str] = getattr(self._writer, "notes", [])
            self.notes += notes
            notes.clear()
            return answers
        rooms = [max(1, min(max_new_tokens, max_tokens - len(prompt))) for prompt in prompts]

        def found() -> list[Drawn]:
            images = map(digest_of, inputs) if inputs else [""] * len(prompts)
            turns = zip(prompts, seeds, rooms, images, strict=True)
            return [self._answer(*each, ends=ends) for each in turns]

        drawn: list[Drawn] = self.mesh.on_rank_zero(found)
        return [
            Sample(ids.tolist(), known.tolist(), finished=finished, version=version)
            for ids, known, finished, version in drawn
        ]

    @cached_property
    def _writer(self) -> RolloutEngine:
        """What writes the answers of evaluations."""
        rollouts = attrs.evolve(self.config.rollouts, replay=None, lag=0)
        config = attrs.evolve(self.config, rollouts=rollouts)
        return load_engine(find_engine(config))(
            config=config, tokenizer=self.tokenizer, mesh=self.mesh, hooks=self.hooks
        )

    @cached_property
    def _places(self) -> dict[int, tuple[Path, int, int]]:
        """File, row and number of each answer by its seed."""
        places = {}
        for file in recorded(Path(str(self.config.rollouts.replay)) / ROLLOUTS).values():
            for row, seeds in enumerate(read_columns(file, "seeds")["seeds"].to_pylist()):
                places.update({seed: (file, row, number) for number, seed in enumerate(seeds)})
        if not places:
            raise RLHFError(
                f"rollouts.replay: {self.config.rollouts.replay} has no rollouts; choose the "
                "folder of a run that has written them"
            )
        return places

    def _answer(
        self, prompt: Sequence[int], seed: int, room: int, images: str, *, ends: Sequence[int]
    ) -> Drawn:
        """Return a recorded answer to a prompt with these images, or a turn of one to a prompt with
        those before."""
        source = self.config.rollouts.replay
        turns = (each for each in first_turns(seed) if each[1] in self._places)
        turn, first = next(turns, (0, None))
        if first is None:
            raise RLHFError(
                f"rollouts.replay: {source} has no answer to {self._text(prompt)} with the seed "
                f"{seed}; replay a run with the same rows, train.seed, batch.size and number of "
                "answers"
            )
        file, row, number = self._places[first]
        rows = self._rows(file)
        tokens = rows["tokens"][row].values[number].values.to_numpy()
        logprobs = rows["logprobs"][row].values[number].values.to_numpy()
        spans = spans_of(logprobs)
        start, end = spans[turn] if turn < len(spans) else (0, 0)
        asked = rows["prompt"][row].values.to_numpy()
        if turn and not np.array_equal(np.concatenate([asked, tokens[:start]]), prompt):
            raise RLHFError(
                f"rollouts.replay: what tools return in the answer to {self._text(asked)} is not "
                f"what {file} has; replay with the same tools, whose results depend only on their "
                "arguments"
            )
        if not turn and (not np.array_equal(asked, prompt) or images_of(rows)[row] != images):
            raise RLHFError(
                f"rollouts.replay: {file} answers another prompt in place of {self._text(prompt)}; "
                "replay a run with the same rows, tokenizer and chat template"
            )
        tokens, logprobs = tokens[start:end], logprobs[start:end]
        if len(tokens) > room:
            raise RLHFError(
                f"rollouts.replay: {file} has an answer of {counted(len(tokens), 'token')} to "
                f"{self._text(prompt)}, which may have {room}; allow as many tokens as that run"
            )
        # An answer that was cut after a call has a last turn that has ended.
        stopped = rows["finish"][row].values[number].as_py() == STOP or int(tokens[-1]) in ends
        version = rows["version"][row].as_py() if "version" in rows.column_names else None
        return tokens, logprobs, stopped, version

    def _rows(self, file: Path) -> Any:
        """Return the columns of a file; the rows of a rollout are in one."""
        if self._read is None or self._read[0] != file:
            self._read = file, read_columns(file, *READ)
        return self._read[1]

    def _text(self, prompt: Sequence[int]) -> str:
        """Return the end of a prompt as one line."""
        text = " ".join(str(self.tokenizer.decode(list(prompt), skip_special_tokens=True)).split())
        return repr(text if len(text) <= SHOWN else f"...{text[-SHOWN:]}")
