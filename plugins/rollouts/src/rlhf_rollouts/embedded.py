"""Answers that a run's own model writes, on any number of ranks, also with sharded weights."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from attrs import field, frozen
from transformers import Cache

from rlhf.engine import Axis, Engine, Mesh
from rlhf.errors import SameOnAllRanks
from rlhf.hookspecs import BackendHooks
from rlhf.plugin import Config
from rlhf.rollouts import quiet_transformers
from rlhf.trainer import Sample
from rlhf_rollouts.attention import attention_of_rows
from rlhf_rollouts.cache import has_states, row_bytes
from rlhf_rollouts.decoder import Forward, Limits, Rows, Start
from rlhf_rollouts.generate import generated, longest_matters
from rlhf_rollouts.graphs import Graphs, captures
from rlhf_rollouts.probe import Verdict, examine
from rlhf_rollouts.slots import Slots, pace_of

SHARE = 0.5
"""Share of an accelerator's free memory that the rows of a batch may take."""
LOGITS = 16
"""Bytes that a step needs for each logit: in the model's precision, in float32, and between."""


@frozen(kw_only=True, eq=False)
class Embedded:
    """The model of the run writes the answers itself.

    Each rank writes an equal number of the answers, those of similar length. They are written in
    the rows of a batch, a token of all rows at a time, and a row whose answer has ended begins the
    next one. A model that the rows do not support, or compute otherwise than a plain forward,
    writes by transformers' `generate`, and one that trains one path at a time, one answer at a
    time.
    """

    config: Config
    tokenizer: Any
    mesh: Mesh
    hooks: BackendHooks
    notes: list[str] = field(factory=list, init=False)
    """Lines for the output of the run."""
    _noted: set[str] = field(factory=set, init=False)
    _verdicts: "WeakKeyDictionary[Any, Verdict]" = field(factory=WeakKeyDictionary, init=False)
    """Whether rows support a model, by its module."""
    _uncaptured: "WeakSet[Any]" = field(factory=WeakSet, init=False)
    """Modules whose steps could not be captured, which is not tried again."""
    _streams: dict[torch.device, Any] = field(factory=dict, init=False)
    """The stream of all captures, by device: libraries keep a workspace for each stream."""

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
        """See `rlhf.rollouts.RolloutEngine`."""
        if not prompts:
            return []
        inputs = inputs or [{}] * len(prompts)
        answers = [
            Start(
                prompt=prompt, seed=seed, inputs=own,
                room=max(1, min(max_new_tokens, max_tokens - len(prompt))),
            )
            for prompt, seed, own in zip(prompts, seeds, inputs, strict=True)
        ]  # fmt: skip
        limits = Limits(
            ends=torch.tensor(list(ends), dtype=torch.int64, device=engine.device),
            temperature=temperature, tokens=engine.module.tokens,
        )  # fmt: skip
        generating = self.hooks.generation_context(engine=engine)
        with torch.no_grad(), quiet_transformers(), generating:
            own = self._write(engine, answers, limits)
        answered = ChainMap(*self.mesh.shards.gather(own))
        samples = [answered[place] for place in range(len(prompts))]
        if not all(isfinite(sum(sample.logprobs)) for sample in samples):
            raise SameOnAllRanks(
                f"the logits of {type(engine.module.causal).__name__} are not finite in "
                f"{engine.precision}, so no answer can be drawn from them; lower optim.lr, or "
                "start from another checkpoint"
            )
        return samples

    def _write(self, engine: Engine, answers: Sequence[Start], limits: Limits) -> dict[int, Sample]:
        """Return this rank's share of the answers by index."""
        budget = self.config.batch.budget
        if engine.module.path == "separate":
            # What it computes for a row may depend on the others.
            self._note(
                f"{type(engine.module.causal).__name__} writes one answer at a time by generate of "
                "transformers, since its attention path is separate"
            )
            return generated(engine, answers, limits, mesh=self.mesh, pad=self._pad, budget=1)
        if any(one.inputs for one in answers):
            self._note(
                f"{type(engine.module.causal).__name__} answers prompts with images by generate of "
                "transformers"
            )
            return generated(engine, answers, limits, mesh=self.mesh, pad=self._pad, budget=budget)
        prompts = self._verdict(engine, answers[0].prompt).prompts
        if prompts is None:
            return generated(engine, answers, limits, mesh=self.mesh, pad=self._pad, budget=budget)
        samples = self._in_rows(engine, answers, limits, prompts)
        if engine.device.type != "cpu":
            # A training step needs what the rows and their graphs had.
            torch.get_device_module(engine.device).empty_cache()
        return samples

    def _in_rows(
        self, engine: Engine, answers: Sequence[Start], limits: Limits, prompts: Cache
    ) -> dict[int, Sample]:
        """Return this rank's share of the answers by index, written in rows."""
        share = shared_out(answers, self.mesh.shards)
        together = self.mesh.shards if engine.sharded and self.mesh.shards.size > 1 else None
        if together is not None and not share:
            # Every forward may gather weights: a rank without an answer repeats one.
            share = [0]
        own = [answers[place] for place in share]
        pace = pace_of(engine.device)
        longest = max((len(one.prompt) + one.room - 1 for one in answers), default=1)
        length = -(-longest // pace.block) * pace.block
        num_rows = self._num_rows(engine, prompts, length)
        if not own:
            return {}
        graphs = self._graphs(engine)
        with attention_of_rows(engine.module.causal):
            rows = Rows.blank(
                Forward(engine.module.model, engine.module.causal), prompts, limits,
                rows=min(num_rows, len(own)), length=length, most=max(one.room for one in own),
                graphs=graphs,
            )  # fmt: skip
            slots = Slots(
                rows=rows, answers=own, budget=self.config.batch.budget, alike=has_states(prompts),
                pace=pace, pad=self._pad, together=together,
            )  # fmt: skip
            samples = slots.run()
        if graphs.failure:
            self._uncaptured.add(engine.module)
            self._note(f"its steps run without graphs ({graphs.failure})")
        return {share[number]: sample for number, sample in samples.items()}

    def _graphs(self, engine: Engine) -> Graphs:
        """Return what runs the steps of a rollout, with graphs where they can be captured."""
        module, device = engine.module, engine.device
        divided = engine.sharded or self.mesh.tensor.size > 1
        # To know the longest row, the host waits for the device, which no capture permits.
        waits = longest_matters(module.causal) or module in self._uncaptured
        if divided or waits or not captures(device):
            return Graphs()
        if device not in self._streams:
            self._streams[device] = torch.get_device_module(device).Stream(device)
        return Graphs(device, self._streams[device])

    def _verdict(self, engine: Engine, prompt: Sequence[int]) -> Verdict:
        """Return whether rows support the model. Collective at the first call for a model."""
        module = engine.module
        if module not in self._verdicts:
            verdict = examine(engine, prompt, self.mesh)
            self._verdicts[module] = verdict
            if verdict.prompts is None:
                self._note(
                    f"{type(module.causal).__name__} writes by generate of transformers: "
                    f"{verdict.reason}"
                )
        return self._verdicts[module]

    def _num_rows(self, engine: Engine, prompts: Cache, length: int) -> int:
        """Return how many rows of `length` tokens a batch may have: as many as fit into
        `batch.tokens`, on an accelerator more if its memory has room. Collective."""
        rows = max(1, self.config.batch.budget // length)
        if engine.device.type != "cpu":
            vocabulary = engine.module.causal.config.get_text_config().vocab_size
            size = row_bytes(prompts, length) + LOGITS * vocabulary
            rows = max(rows, rows_that_fit(int(SHARE * free_memory(engine.device)), size))
        # Ranks that compute the same rows must have as many.
        fewest = self.mesh.max(torch.tensor(-rows, device=engine.device))
        return -int(fewest)

    @property
    def _pad(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id if pad is None else pad)

    def _note(self, text: str) -> None:
        line = f"rollouts   {text}"
        if line not in self._noted:
            self._noted.add(line)
            self.notes.append(line)


def shared_out(answers: Sequence[Start], shards: Axis) -> list[int]:
    """Return the indices of the answers that this rank writes, those with long prompts first and
    those to equal prompts one after the other."""
    first: dict[tuple[int, ...], int] = {}
    for number, answer in enumerate(answers):
        first.setdefault(tuple(answer.prompt), number)
    order = sorted(
        range(len(answers)),
        key=lambda n: (-len(answers[n].prompt), first[tuple(answers[n].prompt)], n),
    )
    start, stop = (len(order) * rank // shards.size for rank in (shards.rank, shards.rank + 1))
    return order[start:stop]


def rows_that_fit(memory: int, size: int) -> int:
    """Return how many rows of `size` bytes fit into `memory` bytes, down to a power of two: equal
    runs find a little more or less free memory, and another number of rows rounds otherwise."""
    rows = memory // size
    return 1 << (rows.bit_length() - 1) if rows else 0


def free_memory(device: torch.device) -> int:
    """Return the free bytes of an accelerator, with those that torch keeps for later tensors."""
    module = torch.get_device_module(device)
    free: int = module.mem_get_info(device)[0]
    return free + int(module.memory_reserved(device) - module.memory_allocated(device))
