"""Specifications of the hooks, grouped by the phase of a run in which they are called.

Backend hooks are `firstresult`: the backend implements each of them once, extensions may wrap them.
They run on every rank and never return None. A collective hook must be called on all ranks.
Observer hooks run on rank 0 only and return nothing. Their `run` is a `RunRecord`: `name` (of the
trainer), `folder`, `config`, `steps` of the whole schedule, `id`, `settings` and `plan`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pluggy
from attrs import field, frozen

from rlhf.config.field_docs import documented

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from rlhf.config.sections import Config
    from rlhf.engine import (
        Engine,
        EngineState,
        Layout,
        Mesh,
        ModelShape,
        Plan,
        SavedState,
        StateKind,
    )

hookspec = pluggy.HookspecMarker("rlhf")
hookimpl = pluggy.HookimplMarker("rlhf")


@documented
@frozen(kw_only=True)
class RunRecord:
    """The run as observers see it."""

    name: str
    """The trainer's name."""
    folder: Path
    """The run folder."""
    config: Config
    """The whole configuration, with the run's choices in place of `auto`."""
    steps: int
    """Optimizer steps of the whole schedule."""
    id: str = ""
    """A random name of this run, for trackers: a resumed run has the same one."""
    settings: Mapping[str, Any] = field(factory=dict)
    """The configuration by dotted names, such as `optim.lr`, without settings that are null."""
    plan: Mapping[str, Any] = field(factory=dict)
    """How each model runs, by role, as in plan.json."""


MEASURED = frozenset({"tokens_per_s", "mfu", "peak_memory_gib", "padding"})
"""Core's metrics that depend on the machine."""
CORE_METRICS = MEASURED | {
    "step", "loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "skipped_steps",
    "router_loss",
}  # fmt: skip
"""Names in `metrics.jsonl` that core writes itself."""


def curves(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are one number, named as curves: `train/loss`, `eval/loss`."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    return {name if "eval/" in name[:5] else f"train/{name}": numbers[name] for name in numbers}


def sample_table(
    step: int, samples: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[list[Any]]]:
    """Return the samples of `on_samples` as a table: the names of its columns, and a row for each
    answer. A list of scores becomes text."""
    scored = any("scores" in sample for sample in samples)
    rows = [
        [step, sample["row"], sample["prompt"], answer, score][: 4 + scored]
        for sample in samples
        for answer, score in zip_longest(sample["answers"], sample.get("scores", ()))
    ]
    for row in rows:
        row[4:] = [str(score) if isinstance(score, list) else score for score in row[4:]]
    return ["step", "row", "prompt", "answer", "score"][: 4 + scored], rows


@documented
@frozen(kw_only=True)
class Finding:
    """One line of `rlhf doctor`."""

    subject: str
    """What was looked at, such as `compiler`."""
    here: str
    """What there is."""
    state: Literal["ok", "optional", "missing"] = "ok"
    """missing: every run needs it, and the exit code is 2. optional: only `feature` needs it."""
    feature: str = ""
    """What needs it."""
    remedy: str = ""
    """The command that installs it, or what to do."""


class BackendHooks:
    """Hooks that a backend implements.

    Its settings are `config.backend_section`, an instance of the config class of its record. A run
    calls the hooks in this order:

    1. `setup_mesh`.
    2. For each model, in the order of `Trainer.setup`: `configure_zero`, `estimate_memory`,
       `model_context` and `load_weights` (both only for a language model with a `sharded` plan),
       `shard`, `build_optimizer` and `build_schedule` (both only if it is trained), `prepare`. A
       language model then runs without gradient, to choose its attention path.
    3. `save_checkpoint` for each engine whose weights change, to know the size of a checkpoint. The
       last call of an engine may have been a forward without backward.
    4. `load_checkpoint` for each of them, if the run is resumed.
    5. The steps. `save_checkpoint` may follow an evaluation, which has no backward either.
    6. `weights`, then `close_mesh`.

    The hooks do not all get the same module:

    - `model_context` and `load_weights` are about the transformers model.
    - `shard`, `build_optimizer` and `prepare` get one module, which is also `engine.module`. For a
      language model it is a wrapper: its `model` is the transformers model, perhaps under peft. The
      wrapper may have parameters of the trainer's own, which `load_weights` has not seen.
    - A module of `run.prepare` has no wrapper. Its weights are whole, and `load_weights` is
      not called.

    Parameters have the dtype in which they are computed and trained: that of the plan's precision,
    or fp32 where transformers keeps it. The optimizer's groups have one dtype each.
    """

    @hookspec(firstresult=True)
    def setup_mesh(self, config: Config) -> Mesh:
        """Start the process group if there is none, seed all random generators and choose the
        device.

        Called once, before any model is loaded. A process may be in a group already, as the ranks
        of the tests are: the backend then uses that group. Raises RLHFError if the device or the
        group is not available, or if the sizes of axes do not divide the ranks. Collective."""

    @hookspec(firstresult=True)
    def axis_sizes(self, config: Config, ranks: int) -> Mapping[str, int]:
        """Return the sizes of the mesh's axes on `ranks` ranks, as `rlhf.engine.axes` takes them.

        `rlhf plan` asks for them without a process group. Core's default makes all ranks data
        ranks. Raises RLHFError if they do not divide the ranks."""

    @hookspec(firstresult=True)
    def configure_zero(
        self,
        config: Config,
        mesh: Mesh,
        model_shape: ModelShape,
        role: str,
        trained: bool,
        occupied: int,
    ) -> Plan:
        """Return the backend's plan for the model of `role`, as plain data, the same on every rank.

        A model that is not `trained` has no gradients and no optimizer. The models that the run
        already has take `occupied` bytes of each accelerator, by `estimate_memory`. Not
        collective."""

    @hookspec(firstresult=True)
    def estimate_memory(
        self, config: Config, plan: Plan, model_shape: ModelShape, mesh: Mesh, trained: bool
    ) -> Mapping[str, int]:
        """Return the bytes that a model needs on each accelerator, without activations.

        The keys are `weights` and, if the model is `trained`, `gradients`, `masters`, `optimizer`,
        `buffers`, `updating` (transient memory of the optimizer's step) and `reducing` (peak of one
        micro-batch's gradients in backward, until they are reduced or accumulated); `host` and
        `nvme` are what each rank has in host memory and in files instead. Called before any weight
        is read. Not collective."""

    @hookspec(firstresult=True)
    def layouts(self, config: Config, mesh: Mesh, model_shape: ModelShape) -> Sequence[Layout]:
        """Return the ways in which the backend can run the trained model, the fastest first.

        `rlhf plan` compares them, a run chooses among those that are `configured`, and an
        out-of-memory error names others. The hardware is that of `mesh`, which may not be this
        machine's. Core's default returns none, so that there is only the plan of
        `configure_zero`."""

    @hookspec(firstresult=True)
    def model_context(self, plan: Plan, role: str, mesh: Mesh) -> AbstractContextManager[Any]:
        """Return the context in which the transformers model of `role` is created; called only
        if the plan is `sharded`.

        It may shard the parameters, over `mesh.shards`, or leave that to `shard`. A backend calls
        `rlhf.engine.register_sharding` before, so that core knows the whole shape of each
        parameter."""

    @hookspec(firstresult=True)
    def load_weights(
        self, module: nn.Module, weights: Mapping[str, Tensor] | None, plan: Plan, mesh: Mesh
    ) -> tuple[str, ...]:
        """Load weights into a transformers model that was created sharded; called only if the
        plan is `sharded`.

        `module` is not yet in the wrapper that `build_optimizer` and `prepare` get.
        `weights` is the full state dict in rank 0's host memory and None on other ranks. The
        parameters have their dtypes, even if `model_context` creates all shards in one. Only one
        parameter is whole at a time on an accelerator. Returns the names of parameters that are not
        in `weights`. Collective."""

    @hookspec(firstresult=True)
    def shard(self, model: nn.Module, plan: Plan, mesh: Mesh) -> bool:
        """Divide the parameters of a loaded `model` among the ranks, in place, before its optimizer
        is built.

        Called once for each model, trained or not, with the module that `prepare` gets: adapters
        and the trainer's own parameters are in it. Parameters may be replaced. A language model
        with a `sharded` plan may still be on the host. Core's default changes nothing. Returns
        True. Collective."""

    @hookspec(firstresult=True)
    def build_optimizer(
        self, groups: Sequence[Mapping[str, Any]], config: Config, plan: Plan, model: nn.Module
    ) -> Optimizer:
        """Return the optimizer of `groups` (`{"params": [...], "weight_decay": float, "lr":
        float}`), the trained parameters of `model`. The run prints its `notes`, a list of lines, if
        it has any."""

    @hookspec(firstresult=True)
    def build_schedule(self, optimizer: Optimizer, config: Config, steps: int) -> LRScheduler:
        """Return the learning rate schedule over `steps` optimizer steps: step k of N has the rate
        f(k / N). Core has a default implementation."""

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
        """Return an engine around `model`, which advances `schedule` with every step. Without an
        optimizer, the engine is for inference only. Collective."""

    @hookspec(firstresult=True)
    def save_checkpoint(self, engine: Engine) -> EngineState:
        """Return what resuming `engine` needs: weights, and the optimizer's states if it is
        trained. Core writes it to checkpoints. Not collective."""

    @hookspec(firstresult=True)
    def load_checkpoint(self, engine: Engine, saved: SavedState) -> bool:
        """Restore `engine` from what `save_checkpoint` returned, perhaps with another number of
        ranks, sharding or offload. Each rank reads what it holds now. Returns True. Collective."""

    @hookspec(firstresult=True)
    def weights(
        self, engine: Engine, buckets: Sequence[Sequence[str]]
    ) -> Iterator[Mapping[str, Tensor]]:
        """Yield, for each bucket of names in `engine.module`, its whole weights and buffers.

        Core chooses the buckets by the bytes of the whole weights, the same on every rank. The
        values are on the device of every rank until the next bucket is taken, when shards take
        their place again; nobody writes into them. Every rank takes all buckets. Collective."""

    @hookspec(firstresult=True)
    def mix_weights(
        self, engine: Engine, source: Engine, share: float, names: Mapping[str, str]
    ) -> bool:
        """Set each weight of `engine` in `names` to `share` times that of `source` which it names
        plus `1 - share` times its own.

        It is not trained. Both have one shape, perhaps two dtypes, each divided in its own way;
        `source` may be `engine`. One parameter is whole at a time. Returns True. Collective."""

    @hookspec(firstresult=True)
    def generation_context(self, engine: Engine) -> AbstractContextManager[Any]:
        """Return the context in which every rank can write answers with the engine's model, by
        forwards with a cache or `generate`. Collective."""

    @hookspec(firstresult=True)
    def offload_states(self, engine: Engine, kinds: Collection[StateKind]) -> int:
        """Move these kinds of the engine's states from the device to the host until
        `reload_states`; returns the bytes of device memory that this releases on this rank.

        Memory that another kind uses too stays, and so does what is on the host already. Without
        its `weights` an engine cannot run; without the others it only runs forward. Core's default
        moves nothing. Not collective."""

    @hookspec(firstresult=True)
    def reload_states(self, engine: Engine, kinds: Collection[StateKind]) -> bool:
        """Move these kinds of states back to the device, unchanged to the last bit. Returns True.
        Not collective."""

    @hookspec(firstresult=True)
    def close_mesh(self, mesh: Mesh) -> bool:
        """End the process group, if `setup_mesh` has started it. Returns True."""

    @hookspec(firstresult=True)
    def diagnose(self) -> Sequence[Finding]:
        """Return what this machine has for the backend and what is missing, for `rlhf doctor`.

        Called in one process without a group. A `rlhf.hookspecs.Finding` has `subject`, `here`
        (what there is), `state` (`ok`; `optional`, if only `feature` needs it; `missing`, if every
        run does), `feature` and `remedy`. Core's default finds nothing."""


class ObserverHooks:
    """What an observer may implement; each hook is optional.

    The order is `on_start`; `on_step`, `on_eval`, `on_samples` and `on_checkpoint` as they happen;
    `on_finish`. A resumed run begins with `on_start` too: it has the same `run.id`, and the steps
    after its checkpoint come again. The observers of a configuration are called in its order.

    Every observer is created and called in a thread of its own, and gets its own copy of metrics
    and samples. The run waits until a call returns, but at most 5 seconds. Then it continues with a
    warning, and the observer gets its other calls, in order, when that call returns. If an observer
    raises, the run continues without it: a warning names it, and `errors/observer-NAME.txt` in the
    run folder has the traceback. KeyboardInterrupt and SystemExit end the run as always.

    An observer may have an attribute `remedy`: what to do if its server does not answer, a text
    with which these warnings end.
    """

    @hookspec
    def on_start(self, run: RunRecord) -> None:
        """Called when the models are ready, before the evaluation of step 0
        (`train.eval_at_start`) and the first step."""

    @hookspec
    def on_step(self, run: RunRecord, step: int, metrics: Mapping[str, float]) -> None:
        """Called after a logged step; `metrics` are those in `metrics.jsonl`."""

    @hookspec
    def on_eval(self, run: RunRecord, step: int, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation; the names of its metrics begin with `eval/`."""

    @hookspec
    def on_samples(self, run: RunRecord, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Called after `on_eval` with the samples of the evaluation (`train.samples`), which are
        also in `samples.jsonl`.

        Each has `row` (file and line), `prompt` (text) and `answers` (list of texts that the model
        wrote). `images` has small pictures of the images of the row, as data URLs in JPEG, if it
        has any. A trainer that scores answers gives those of the row, and `scores`: for each answer
        a number, or a list of numbers, such as one per step. An on-policy trainer gives answers of
        the evaluation with the highest and the lowest rewards, which are their `scores`, and in
        `which` the place of the answer, such as `lowest reward 1`."""

    @hookspec
    def on_checkpoint(self, run: RunRecord, step: int, directory: Path) -> None:
        """Called when a checkpoint is complete on disk."""

    @hookspec
    def on_finish(self, run: RunRecord, error: BaseException | None) -> None:
        """Called at the end of a run that began, also if it was stopped; `error` is None unless it
        failed."""
