"""What a backend's module imports: the engine protocol and the values between core and a backend.

A backend prepares modules as engines, places processes in a `Mesh`, turns the configuration into a
`Plan`, and tells core about sharded parameters through `register_sharding`.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from attrs import Factory, field, frozen
from torch import Tensor

from rlhf.config.field_docs import documented
from rlhf.config.sections import Config, OptimizerKind
from rlhf.devices import Deferred, fused_on, has_triton, on_device, rehearsing_on
from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf.folder.disk import free_space, write_speed
from rlhf.forwards import replace_forward, replaced_forward
from rlhf.sharding import Sharding, free, is_sharded, register_sharding, whole_shape

__all__ = [
    "GIB", "Axis", "Deferred", "Engine", "EngineState", "Fragment", "LaterOutcome", "Layout",
    "Mesh", "ModelShape", "Plan", "Readout", "SavedState", "Sharding", "StateKind", "StepOutcome",
    "axes", "free", "free_space", "fused_on", "gib", "has_triton", "is_sharded", "on_device",
    "register_sharding", "rehearsing_on", "replace_forward", "replaced_forward", "whole_shape",
    "write_speed",
]  # fmt: skip

T = TypeVar("T")
GIB = 2**30

Readout = Callable[..., Mapping[str, Tensor]]
"""`readout(hidden [T, H], head, batch) -> {name: tensor}`, run inside the engine's forward."""


StateKind = Literal["optimizer", "masters", "gradients", "weights"]
"""What an engine keeps on its device: the optimizer's moments, its own copy of the weights in
another precision or layout, gradients, and the weights that the model computes with."""


@documented
@frozen(kw_only=True)
class ModelShape:
    """Size of a model, counted on the meta device before any weight is read."""

    parameters: int
    """Number of all parameters; tied ones count once."""
    trainable: int
    """Number of parameters that get a gradient (all of them without LoRA and freezing)."""
    largest_layer: int
    """Number of parameters of the largest decoder layer or embedding: what ZeRO-3 gathers at
    once."""
    hidden: int
    """Width of the hidden states."""
    layers: int
    """Number of decoder layers."""
    head: int
    """Number of parameters of the output head's weight (vocabulary or labels)."""
    fp32: int = 0
    """Number of parameters of a transformers model that are in fp32, whatever its precision."""
    fp32_trainable: int = 0
    """Number of those that get a gradient."""
    lookup: int = 0
    """Number of parameters of the embedding if it is only looked up; 0 if the head is tied to
    it."""
    tensor: int = 1
    """The largest number of ranks over which its layers can be divided; its divisors can too."""
    undivided: str = "it is not a transformers model"
    """Why its layers cannot be divided, if `tensor` is 1."""
    tower_layers: int = 0
    """Number of layers in towers for images and sounds."""
    scans: int = 0
    """Number of layers with a recurrent scan."""
    idle: int = 0
    """Number of parameters of a mixture's experts that a token does not pass."""

    @property
    def mean_layer(self) -> int:
        """Return the mean number of parameters of a layer, also of towers."""
        layers = max(self.layers + self.tower_layers, 1)
        return (self.parameters - self.head - self.lookup) // layers

    def num_states(self, optimizer: OptimizerKind) -> float:
        """Return how many numbers the optimizer keeps for each trained weight, in the dtype of its
        master; their mean, if all that is trained in the layers are matrices."""
        if optimizer.layer_states is None:
            return optimizer.states
        layers = min(self.trainable, self.parameters - self.head - self.lookup)
        saved = (optimizer.states - optimizer.layer_states) * layers
        return optimizer.states - saved / max(self.trainable, 1)


@documented
@frozen(kw_only=True)
class Plan:
    """How a backend runs a configuration. Returned by `configure_zero`, written to `plan.json`."""

    sharded: bool = False
    """Whether the ranks divide the weights of the model, so that each forward is collective."""
    precision: str
    """`fp32`, `bf16` or `fp16`."""
    tensor: int = 1
    """Number of ranks over which the layers are divided."""
    settings: dict[str, Any] = field(factory=dict)
    """The backend's own configuration, as plain data."""
    offload_states: Literal["auto", "always", "never"] = "never"
    """Whether phases that do not need all states of the engines leave them on the host: if such a
    phase would not fit the device (auto), always, or never."""
    summary: str = ""
    """One line for the start of the run, which begins with how the model is divided, such as
    `ZeRO 2`."""
    patches: tuple[str, ...] = ()
    """Names of the patches of its library that the backend may install for this plan."""


@documented
@frozen(kw_only=True)
class Layout:
    """A way in which a backend can run the trained model: what is in shards and what is on the
    host. Returned by `layouts`."""

    name: str
    """Such as `ZeRO 2, optimizer on the CPU`."""
    settings: str
    """What to set for it, such as `deepspeed.stage 2`."""
    config: Config
    """The configuration with this layout and nothing left to choose."""
    plan: Plan
    """How the backend runs the model."""
    cost: float
    """Time that it adds to a step, as a share; those that cost less come first."""
    configured: bool
    """Whether the configuration asks for it or leaves the choice to the run."""


@documented
@frozen(kw_only=True)
class Axis:
    """This process along one axis of the mesh, and the collectives over the ranks of that axis.
    With one rank there need not be a process group, and every collective returns at once."""

    rank: int = 0
    """Position of this process along the axis, from 0."""
    size: int = 1
    """Number of positions."""
    group: Any = None
    """The process group of the ranks that differ only in this axis; None is that of all ranks."""

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce `values` in place by addition; collective."""
        if self.size > 1:
            torch.distributed.all_reduce(values, group=self.group)
        return values

    def max(self, values: Tensor) -> Tensor:
        """All-reduce `values` in place by the maximum; collective."""
        if self.size > 1:
            torch.distributed.all_reduce(
                values, op=torch.distributed.ReduceOp.MAX, group=self.group
            )
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return each rank's picklable `value` in the order of ranks; collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self.group)
        return values


def axes(rank: int, *, data: int = 1, sequence: int = 1, tensor: int = 1) -> dict[str, Axis]:
    """Return the axes of these sizes as `rank` of all sees them, without process groups. Neighbours
    differ in `tensor` first, then in `sequence`, so that these stay on one host."""
    rest, tensor_rank = divmod(rank, tensor)
    data_rank, sequence_rank = divmod(rest, sequence)
    return {
        "data": Axis(rank=data_rank, size=data),
        "shards": Axis(rank=rest, size=data * sequence),
        "sequence": Axis(rank=sequence_rank, size=sequence),
        "tensor": Axis(rank=tensor_rank, size=tensor),
    }


@documented
@frozen(kw_only=True)
class Mesh:
    """This process among the ranks, along three axes. Only ranks of the data axis have rows of
    their own: rows, sums and counts are those of `data`, never of all ranks. The collectives of the
    mesh itself are over all ranks."""

    rank: int = 0
    """Number of this process, from 0."""
    world: int = 1
    """Number of processes."""
    data: Axis = Factory(lambda mesh: mesh._everyone, takes_self=True)
    """Ranks that have different rows; by default all of them."""
    shards: Axis = Factory(lambda mesh: mesh._everyone, takes_self=True)
    """Ranks that add up their gradients and may divide the states of a model: those that differ in
    `data` or `sequence`; by default all of them."""
    sequence: Axis = field(factory=Axis)
    """Ranks that divide the tokens of the same rows."""
    tensor: Axis = field(factory=Axis)
    """Ranks that divide the weights and compute the same rows."""
    local_rank: int = 0
    """Number of this process on its host, from 0."""
    device: torch.device = field(factory=lambda: torch.device("cpu"))
    """Device of this rank."""
    memory: int = 0
    """Bytes of device memory of this rank (on a CPU its share of the host's); 0 if unknown."""

    def max(self, values: Tensor) -> Tensor:
        """All-reduce `values` in place over all ranks by the maximum; collective."""
        return self._everyone.max(values)

    def gather(self, value: Any) -> list[Any]:
        """Return each rank's picklable `value` in the order of ranks; collective."""
        return self._everyone.gather(value)

    def barrier(self) -> None:
        """Wait until every rank has called this; collective."""
        if self.world > 1:
            own = None if self.device.type == "cpu" else [self.device.index]
            torch.distributed.barrier(device_ids=own)

    def on_rank_zero(self, act: Callable[[], T], *, share: bool = True) -> T:
        """Return the result of `act` on rank 0, on every rank; with `share` False on rank 0 only,
        and None elsewhere. An RLHFError is raised on every rank, so that none waits for one that
        has ended. `act` may take longer than a collective operation. Collective."""
        value: Any = None
        error: RLHFError | None = None
        try:
            if self.rank == 0:
                value = act()
        except RLHFError as problem:
            error = problem
        finally:
            self._await_rank_zero()
        shared, message = self.gather((value if share else None, error and str(error)))[0]
        if message is not None:
            same = SameOnAllRanks(message)
            for note in getattr(error, "__notes__", ()):
                same.add_note(note)
            raise same from error
        return shared if share else value

    def _await_rank_zero(self) -> None:
        """Wait without a timeout until rank 0 has called this as often as this rank has."""
        if self.world == 1:
            return
        store = torch.distributed.distributed_c10d._get_default_store()
        calls, pause = store.add(f"rlhf/rank-{self.rank}", 1), 0.001
        while store.add("rlhf/rank-0", 0) < calls:
            time.sleep(pause)
            pause = min(1.1 * pause, 0.1)

    @property
    def _everyone(self) -> Axis:
        return Axis(rank=self.rank, size=self.world)


@documented
@frozen(kw_only=True)
class StepOutcome:
    """Result of one optimizer step."""

    moved: bool
    """False if a gradient was not finite on some rank: no weight has changed."""
    grad_norm: float
    """Norm of the whole gradient before clipping, over all ranks; nan or inf if not moved."""
    skipped_by_scaler: bool = False
    """fp16 only: the dynamic loss scaler lowered its scale and skipped the step; training
    continues."""

    def read(self) -> "StepOutcome":
        """Return the outcome itself, which needs no wait."""
        return self


@documented
@frozen
class LaterOutcome:
    """Result of an optimizer step whose gradient norm is still being copied from the device.

    Only for a backend whose device itself keeps a non-finite gradient from every weight: the loop
    reads the result after it has started the next step.
    """

    norm: Deferred
    """The `StepOutcome.grad_norm`, [1]."""
    skipped_by_scaler: ClassVar[bool] = False

    def read(self) -> StepOutcome:
        """Wait for the norm and return the outcome."""
        (value,) = self.norm.read()
        return StepOutcome(moved=math.isfinite(value), grad_norm=value)


@documented
@frozen(kw_only=True, eq=False)
class Fragment:
    """A part of a parameter, of a buffer or of a state of the optimizer, as checkpoints hold it."""

    name: str
    """Name in the engine's module."""
    kind: str
    """`weight` in the highest precision that the engine has, or a state such as `exp_avg`."""
    offset: int
    """Elements of the flattened whole before this part."""
    values: Tensor
    """The part, flat: a view of the engine's memory."""
    replicated: bool = False
    """Whether every rank holds the same part. Each then writes a share of it."""


@documented
@frozen(kw_only=True)
class EngineState:
    """What resuming an engine needs, as this rank holds it."""

    fragments: Sequence[Fragment]
    """Over all ranks they cover every value once."""
    more: Mapping[str, Any] = field(factory=dict)
    """What is not a tensor, as plain data for JSON; the same on every rank."""


@documented
class SavedState(Protocol):
    """The state of an engine in a checkpoint, which any layout may have written."""

    more: Mapping[str, Any]
    """`EngineState.more` as it was saved."""

    def kinds(self, name: str) -> Collection[str]:
        """Return the kinds of values that the checkpoint has of a weight: `weight`, and what the
        optimizer kept."""

    def read(self, name: str, kind: str, offset: int, into: Tensor) -> None:
        """Fill `into`, flat, with the elements from `offset` on, reading no others. Raises
        RLHFError if the checkpoint does not have them."""


@documented
class Engine(Protocol):
    """A model prepared by a backend. The only source of truth for precision and device."""

    module: Any
    """The prepared module, unwrapped: a `PackedModel`, or one of the trainer's own."""
    role: str
    """`policy`, or another name such as `critic`, `reference` or `teacher`."""
    sharded: bool
    """Whether the ranks divide its weights, as `Plan.sharded`."""
    precision: str
    """`fp32`, `bf16` or `fp16`."""
    device: torch.device

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the module's forward; collective if `sharded`. A loaded model takes a `PackedBatch`
        and a `Readout`, and returns the readout's values by name."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of the scalar `loss`. Collective.

        Gradients are sums over micro-batches and `Mesh.shards`: a backend that averages undoes it.
        `last` marks the last micro-batch of a step.
        """

    def step(self) -> StepOutcome | LaterOutcome:
        """Clip, update the weights, clear the gradients, advance the schedule. Collective.

        A non-finite gradient never reaches a weight. Engines of several roles alternate
        their forwards and backwards, and step one after the other.
        """

    def train(self) -> None:
        """Switch dropout and recomputation on."""

    def eval(self) -> None:
        """Switch dropout and recomputation off."""


def gib(size: float) -> str:
    """Return a number of bytes in GiB, with one decimal place, or three below 1 GiB."""
    value = size / GIB
    return f"{value:.1f}" if value >= 1 else f"{value:.3f}"
