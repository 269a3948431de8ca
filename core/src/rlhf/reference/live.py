"""The reference of a preference loss: what the policy was before its first step, without gradient.

An adapter that is off and a second engine give the starting policy's own numbers to the last bit
when they run the same batch; the cache gives them up to the rounding of another packing.
"""

import abc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs
import torch
from attrs import frozen
from peft import PeftModel
from torch import Tensor

from rlhf.config.reference_modes import check_mode
from rlhf.config.sections import Config
from rlhf.data.batch import PackedBatch
from rlhf.engine import Engine, Readout
from rlhf.errors import RLHFError
from rlhf.model.architecture import DTYPES, read_architecture
from rlhf.model.weights import pretrained_model
from rlhf.readouts import token_logprobs
from rlhf.reference.table import cache_folder

if TYPE_CHECKING:
    from rlhf.run.context import Run

ReferenceMode = Literal["auto", "adapter", "engine", "cache"]
"""adapter: the policy with its adapter off; engine: a frozen second model; cache: log-probabilities
computed once and kept on disk; auto: what `choose_mode` says."""

ATTACHED = "reference_logprobs"
"""Name of the value per token that the cache gives every example."""


class Reference(abc.ABC):
    """Log-probabilities of the starting policy, in float32 and without gradient."""

    mode: str

    @abc.abstractmethod
    def token_logprobs(self, batch: PackedBatch) -> Tensor:
        """Of each of the batch's predictions [N]. Collective at stage 3."""

    def answer_logprobs(self, batch: PackedBatch) -> Tensor:
        """Of each answer the sum over its predictions [A]. Collective at stage 3."""
        tokens = self.token_logprobs(batch)
        return tokens.new_zeros(len(batch.answer_example)).index_add(0, batch.answer, tokens)

    def __call__(self, batch: PackedBatch, readout: Readout) -> Mapping[str, Tensor]:
        """What `readout` gives on the reference. Collective at stage 3. Raises RLHFError in the
        mode cache, which holds log-probabilities alone."""
        raise RLHFError(
            f"the reference's mode is {self.mode}, which has log-probabilities of the data's own "
            "answers alone: choose adapter or engine"
        )


class EngineReference(Reference):
    """A frozen engine, or the policy's with its adapter off."""

    def __init__(self, engine: Engine, *, mode: Literal["adapter", "engine"]) -> None:
        self.engine = engine
        self.mode = mode

    def token_logprobs(self, batch: PackedBatch) -> Tensor:
        return self(batch, token_logprobs)["logprobs"]

    def __call__(self, batch: PackedBatch, readout: Readout) -> Mapping[str, Tensor]:
        with torch.no_grad(), evaluating(self.engine):
            if self.mode == "engine":
                return self.engine(batch, readout)
            with adapter_off(self.engine.module.model):
                return self.engine(batch, readout)


class CachedReference(Reference):
    """What stands with every example of the run's data."""

    mode = "cache"

    def token_logprobs(self, batch: PackedBatch) -> Tensor:
        if ATTACHED not in batch.values:
            # Not the data's own rows: nobody has computed these.
            self(batch, token_logprobs)
        return batch.values[ATTACHED].index_select(0, batch.predict_at)


@frozen(kw_only=True)
class Follower:
    """A frozen engine that moves towards the policy: TR-DPO (arXiv 2404.09656). Its weights
    change, so they belong to the checkpoint."""

    run: "Run"
    role: str
    every: int
    """Optimizer steps between two moves (tau)."""
    mix: float
    """Share of the policy in what it becomes (alpha); 1 replaces it."""

    def after_step(self, step: int) -> None:
        """Move, where `step` steps are a multiple of `every`. Collective."""
        if step % self.every == 0:
            engines = self.run.engines
            self.run.hooks.mix_weights(
                engine=engines[self.role], source=engines["policy"], share=self.mix
            )

    def save(self, directory: Path) -> None:
        """Write the weights, bit for bit. Collective."""
        self.run.hooks.export_weights(engine=self.run.engines[self.role], directory=directory)

    def load(self, directory: Path) -> None:
        """Take the weights back. Collective."""
        run, engine = self.run, self.run.engines[self.role]
        saved = model_in(directory, run.config)
        causal, plan = engine.module.causal, run.plans[self.role]
        weights = None
        if engine.stage < 3 or run.mesh.rank == 0:
            dtype = DTYPES[engine.precision]
            source = pretrained_model(read_architecture(saved), saved, "causal", dtype)
            weights = source.state_dict()
        if engine.stage < 3:
            causal.load_state_dict(weights)
        else:
            run.hooks.load_weights(module=causal, weights=weights, plan=plan, mesh=run.mesh)


def make_reference(
    run: "Run", mode: ReferenceMode, *, every: int | None, mix: float, live: bool
) -> Reference:
    """The reference of `run`'s policy, which is loaded. Collective."""
    chosen, why = choose_mode(run, mode, every=every, live=live)
    check_mode(run.config, chosen, every=every, live=live)
    note = f"reference  {chosen}: {why}"
    if chosen == "cache":
        run.notes.append(f"{note}; {fill_cache(run)}")
        return CachedReference()
    run.notes.append(note)
    if chosen == "adapter":
        return EngineReference(run.engines["policy"], mode="adapter")
    engine = run.load("reference", model=run.config.model, trained=False, dropout=False)
    if every is not None:
        run.followers.append(Follower(run=run, role="reference", every=every, mix=mix))
    return EngineReference(engine, mode="engine")


def choose_mode(
    run: "Run", mode: ReferenceMode, *, every: int | None, live: bool
) -> tuple[Literal["adapter", "engine", "cache"], str]:
    """The mode, and why."""
    if mode != "auto":
        return mode, "as asked"
    if every is not None:
        return "engine", f"it moves towards the policy every {every} steps"
    if run.config.lora is not None:
        return "adapter", "the policy with its adapter off, no second model"
    rows = len(run.examples[0]) if run.examples else 0
    seen = run.steps * run.config.batch.size
    if live or not rows:
        return "engine", "a second model, frozen: it is asked about more than the data's own rows"
    if run.config.model.quantize is not None:
        return "cache", "a second model would not be quantized"
    if seen >= rows:
        return "cache", "every row is trained on, so once for all, and no second model"
    return "engine", f"a second model, frozen: only {seen:,} of {rows:,} rows are trained on"


def fill_cache(run: "Run") -> str:
    """Give the run's examples their log-probabilities; what was done, in words. Collective.

    The policy itself computes them: before its first step, and before a resume takes other weights,
    it is its own reference.
    """
    policy = run.engines["policy"]
    with evaluating(policy):
        return run.cached(ATTACHED, partial(cache_folder, run.config, run.mesh), lambda: policy)


def model_in(directory: Path, config: Config) -> Config:
    """The configuration with the whole model in `directory` instead of its own."""
    model = attrs.evolve(
        config.model, path=str(directory), revision=None, init="pretrained", adapter=None
    )
    return attrs.evolve(config, model=model, lora=None)


@contextmanager
def evaluating(engine: Engine) -> Iterator[None]:
    """Dropout and recomputation off, and afterwards as before."""
    training = engine.module.training
    engine.eval()
    try:
        yield
    finally:
        if training:
            engine.train()


@contextmanager
def adapter_off(model: PeftModel) -> Iterator[None]:
    """The base without its adapter. What needs a gradient stays as it was: peft would make every
    adapter parameter trainable on its return, frozen ones too."""
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        with model.disable_adapter():
            yield
    finally:
        for parameter, needs_gradient in trained.items():
            parameter.requires_grad_(needs_gradient)
