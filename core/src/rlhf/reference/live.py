"""The reference of a preference loss: the policy before its first step, without gradient.

An adapter that is off and a second engine give the starting policy's own numbers to the last bit
when they run the same batch; the cache gives them up to the rounding of another packing.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from attrs import Factory, evolve, field, frozen
from torch import Tensor

from rlhf.config.reference_modes import ReferenceMode, check_reference
from rlhf.config.sections import Config
from rlhf.data.batch import PackedBatch
from rlhf.engine import Engine, Readout
from rlhf.errors import RLHFError, counted
from rlhf.model.head import Head
from rlhf.readouts import answer_logprobs, token_logprobs
from rlhf.registry.gateway import BackendGateway

ChosenMode = Literal["adapter", "engine", "cache"]

REFERENCE = "reference_logprobs"
"""Name of the per-token value that the cache adds to every example."""


@frozen(kw_only=True)
class EngineReference:
    """A frozen engine, or the policy's with its adapter off: an `rlhf.trainer.Reference`."""

    engine: Engine
    mode: Literal["adapter", "engine"]
    extra: Mapping[str, Tensor] = field(factory=dict)
    """First values of the trainer's own parameters at the policy's head, on its device."""

    def token_logprobs(self, batch: PackedBatch) -> Tensor:
        return self(batch, token_logprobs)["logprobs"]

    def answer_logprobs(self, batch: PackedBatch) -> Tensor:
        return self(batch, answer_logprobs)["logprobs"]

    def __call__(self, batch: PackedBatch, readout: Readout) -> Mapping[str, Tensor]:
        with torch.no_grad(), evaluating(self.engine):
            if self.mode == "engine":
                return self.engine(batch, readout)
            with adapter_off(self.engine.module.model):
                return self.engine(batch, partial(self._read, readout))

    def _read(
        self, readout: Readout, hidden: Tensor, head: Head, batch: PackedBatch
    ) -> Mapping[str, Tensor]:
        return readout(hidden, evolve(head, extra=self.extra), batch)


class CachedReference:
    """The log-probabilities that are attached to the examples: an `rlhf.trainer.Reference`."""

    def token_logprobs(self, batch: PackedBatch) -> Tensor:
        if REFERENCE not in batch.values:
            raise self._not_cached()
        return batch.values[REFERENCE].index_select(0, batch.predict_at)

    def answer_logprobs(self, batch: PackedBatch) -> Tensor:
        tokens = self.token_logprobs(batch)
        return tokens.new_zeros(len(batch.answer_example)).index_add(0, batch.answer, tokens)

    def __call__(self, batch: PackedBatch, readout: Readout) -> Mapping[str, Tensor]:
        raise self._not_cached()

    def _not_cached(self) -> RLHFError:
        return RLHFError(
            "the reference's mode is cache, which only has log-probabilities of the data's own "
            "answers and of run.reference(survey=...); call run.reference(live=True)"
        )


@frozen(kw_only=True)
class Follower:
    """Weights that move without being trained: those of a frozen engine towards the policy (TR-DPO,
    arXiv 2404.09656), or averages in a trained one. They change, so they are in checkpoints."""

    engine: Engine
    source: Engine
    """The policy's engine, or `engine` itself."""
    every: int
    """Optimizer steps between two moves (tau)."""
    mix: float
    """Share of the source in the result (alpha); 1 replaces the weights."""
    hooks: BackendGateway
    names: Mapping[str, str] = Factory(
        lambda it: {name: name for name, _ in it.engine.module.named_parameters()}, takes_self=True
    )
    """For each parameter that moves that of `source`; by default all of the same names."""

    def after_step(self, step: int) -> None:
        """Move the weights if `step` is a multiple of `every`. Collective."""
        if step % self.every == 0:
            self.hooks.mix_weights(
                engine=self.engine, source=self.source, share=self.mix, names=self.names
            )


def choose_mode(
    config: Config, mode: ReferenceMode, *, num_rows: int, steps: int, every: int | None, live: bool
) -> tuple[ChosenMode, str]:
    """Return the mode for a run of `steps` over `num_rows` rows, and the reason. Raises RLHFError
    for a mode that the configuration does not allow."""
    seen = steps * config.batch.size
    chosen: ChosenMode
    if mode != "auto":
        chosen, reason = mode, "as configured"
    elif every is not None:
        chosen, reason = "engine", f"it moves towards the policy every {counted(every, 'step')}"
    elif config.lora is not None:
        chosen, reason = "adapter", "the policy with its adapter off, no second model"
    elif live or not num_rows:
        chosen = "engine"
        reason = "a second, frozen model, since it runs on more than the data's own rows"
    elif config.model.quantize is not None:
        chosen, reason = "cache", "a second model would not be quantized"
    elif seen >= num_rows:
        chosen = "cache"
        reason = "every row is trained on, so it is computed once and needs no second model"
    else:
        chosen = "engine"
        reason = f"a second, frozen model, since only {seen:,} of {num_rows:,} rows are trained on"
    check_reference(config, chosen, every=every, live=live)
    return chosen, reason


@contextmanager
def evaluating(engine: Engine) -> Iterator[None]:
    """Switch dropout and recomputation off, and back to the mode before."""
    training = engine.module.training
    engine.eval()
    try:
        yield
    finally:
        if training:
            engine.train()


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Switch the adapter off, and back on. `requires_grad` is restored, since peft would make every
    adapter parameter trainable, frozen ones too."""
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        with model.disable_adapter():
            yield
    finally:
        for parameter, needs_gradient in trained.items():
            parameter.requires_grad_(needs_gradient)
