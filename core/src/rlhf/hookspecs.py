"""The hooks, in the order in which a run calls them. Light: types are named, not imported.

Backend hooks are `firstresult`: exactly one implementation answers, extensions wrap it. They run on
every rank and never return None. Observer hooks run on rank 0, return nothing and change nothing.
Their `run` is a `RunRecord`: `name` (of the trainer), `folder`, `config` and `steps` of the whole
schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy
from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from rlhf.config import Config
    from rlhf.engine import Engine, Mesh, ModelShape, Plan

hookspec = pluggy.HookspecMarker("rlhf")
hookimpl = pluggy.HookimplMarker("rlhf")


@frozen(kw_only=True)
class RunRecord:
    """What an observer may know of a run."""

    name: str
    """The trainer's name."""
    folder: Path
    config: Config
    steps: int
    """Optimizer steps of the whole schedule."""


class BackendHooks:
    """What a backend implements."""

    @hookspec(firstresult=True)
    def setup_mesh(self, config: Config) -> Mesh:
        """Start the process group, seed every generator, choose the device. Collective; once,
        before any model loads. Raises RLHFError for a device or a group that cannot be had."""

    @hookspec(firstresult=True)
    def configure_zero(self, config: Config, mesh: Mesh, model_shape: ModelShape) -> Plan:
        """The backend's whole plan as plain data; the same on every rank, without a collective."""

    @hookspec(firstresult=True)
    def estimate_memory(
        self, config: Config, plan: Plan, model_shape: ModelShape, mesh: Mesh, trained: bool
    ) -> Mapping[str, int]:
        """Bytes that a model takes on each accelerator through a step, activations left out:
        `weights`, and where it is `trained` `gradients`, `optimizer`, `buffers`, `updating` (what
        the optimizer's step takes for a moment) and `reducing` (the most that gradients of one
        micro-batch take in backward until they are reduced or added to the others). Without a
        collective, before any weight is read."""

    @hookspec(firstresult=True)
    def model_context(self, plan: Plan, role: str) -> AbstractContextManager[Any]:
        """The context in which the modules of `role` are created; parameters come out sharded at
        stage 3."""

    @hookspec(firstresult=True)
    def load_weights(
        self, module: nn.Module, weights: Mapping[str, Tensor] | None, plan: Plan, mesh: Mesh
    ) -> tuple[str, ...]:
        """Fill a module that was created sharded. `weights` is the full state dict on rank 0's host
        and None on the others. One parameter is whole at a time. Returns the names that the weights
        did not have. Collective; called at stage 3 alone."""

    @hookspec(firstresult=True)
    def build_optimizer(
        self, groups: Sequence[Mapping[str, Any]], config: Config, plan: Plan
    ) -> Optimizer:
        """The optimizer over `groups` (`{"params": [...], "weight_decay": float}`), with the rate
        of `optim.lr`."""

    @hookspec(firstresult=True)
    def build_schedule(self, optimizer: Optimizer, config: Config, steps: int) -> LRScheduler:
        """The schedule over `steps` optimizer steps: step k of N has the rate f(k / N). Core has a
        default."""

    @hookspec(firstresult=True)
    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        schedule: LRScheduler | None,
        role: str,
        plan: Plan,
        mesh: Mesh,
    ) -> Engine:
        """An engine around `model` that advances `schedule` with every step and keeps it in its
        checkpoints; with optimizer None for inference alone. Collective."""

    @hookspec(firstresult=True)
    def save_checkpoint(self, engine: Engine, directory: Path, state: Mapping[str, Any]) -> bool:
        """Write what resuming `engine` needs into the existing empty `directory`, with `state`
        (plain data, the same on every rank). The caller makes the whole folder atomic. Returns
        True. Collective."""

    @hookspec(firstresult=True)
    def load_checkpoint(self, engine: Engine, directory: Path) -> Mapping[str, Any]:
        """Restore `engine` from `directory` and return the `state` that was saved. Raises RLHFError
        when it was written by another stage or number of ranks. Collective."""

    @hookspec(firstresult=True)
    def read_weights(self, directory: Path) -> Mapping[str, Tensor]:
        """The full-precision state dict of the module in a checkpoint, on the host, without an
        engine and in one process: for `rlhf export`."""

    @hookspec(firstresult=True)
    def export_weights(self, engine: Engine, directory: Path) -> bool:
        """Gather the weights on rank 0's host, one parameter at a time on the accelerator, and
        write them with `rlhf.model.save.save_model(module, weights, directory)`. Returns True.
        Collective."""

    @hookspec(firstresult=True)
    def mix_weights(self, engine: Engine, source: Engine, share: float) -> bool:
        """Move each weight of `engine`, which is not trained, to `share` of that of `source` and
        the rest of its own; both hold the same model, each at its own stage. One parameter is whole
        at a time. Returns True. Collective."""

    @hookspec(firstresult=True)
    def generation_context(self, engine: Engine) -> AbstractContextManager[Any]:
        """Return the context in which core calls `engine.module.model.generate`: evaluation mode,
        without gradient. Core has every rank run the same number of forwards. Collective."""

    @hookspec(firstresult=True)
    def close_mesh(self, mesh: Mesh) -> bool:
        """End the process group. Returns True."""


class ObserverHooks:
    """What an observer may implement; each hook is optional.

    Every observer is called by itself and gets its own copy of the metrics. If one raises, the run
    continues without it: a warning names it, and `errors/observer-NAME.txt` in the run folder has
    the traceback. KeyboardInterrupt and SystemExit end the run as always.
    """

    @hookspec
    def on_start(self, run: RunRecord) -> None:
        """The models are ready; the evaluation of step 0 (`train.eval_at_start`) and the first step
        are next."""

    @hookspec
    def on_step(self, run: RunRecord, step: int, metrics: Mapping[str, float]) -> None:
        """A logged step has ended. `metrics` is what `metrics.jsonl` gets."""

    @hookspec
    def on_eval(self, run: RunRecord, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation has ended; names begin with `eval/`."""

    @hookspec
    def on_checkpoint(self, run: RunRecord, step: int, directory: Path) -> None:
        """A checkpoint is complete on disk."""

    @hookspec
    def on_finish(self, run: RunRecord, error: BaseException | None) -> None:
        """The run has ended: `error` is what it ended with, or None."""
