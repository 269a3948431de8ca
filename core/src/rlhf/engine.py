"""What core asks of a live engine, and where it runs: the protocols between the loop and a
backend."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

import torch
from attrs import field, frozen
from torch import Tensor

from rlhf.config.field_docs import documented
from rlhf.data.batch import PackedBatch

Readout = Callable[..., Mapping[str, Tensor]]
"""`readout(hidden [T, H], head, batch) -> {name: tensor}`, run inside the engine's forward."""


@documented
@frozen(kw_only=True)
class ModelShape:
    """The size of a model, counted on the meta device before any weight is read."""

    parameters: int
    """All parameters, tied ones counted once."""
    trainable: int
    """Parameters that get a gradient (all of them without LoRA and freezing)."""
    largest_layer: int
    """Parameters of the largest decoder layer or embedding: what ZeRO-3 gathers at once."""
    hidden: int
    """Width of the hidden states."""
    layers: int
    """Number of decoder layers."""
    head: int
    """Parameters of the last product: the vocabulary's or the labels' weight."""
    lookup: int = 0
    """Parameters of the embedding that are looked up alone; 0 where the head is tied to it."""

    @property
    def mean_layer(self) -> int:
        """Parameters of a decoder layer, the mean over all."""
        return (self.parameters - self.head - self.lookup) // max(self.layers, 1)


@documented
@frozen(kw_only=True)
class Plan:
    """What `configure_zero` made of the configuration; plain data, written to `plan.json`."""

    stage: int
    """ZeRO stage, 0 to 3; at 3 the weights are sharded too."""
    precision: str
    """`fp32`, `bf16` or `fp16`."""
    settings: dict[str, Any] = field(factory=dict)
    """The backend's own configuration, as it will be given to it (DeepSpeed's JSON)."""
    summary: str = ""
    """One line for the start of the run: stage, offload, optimizer, and why."""
    lighter: tuple[str, ...] = ()
    """The backend's own settings that would take less of the accelerator, the nearest first, each
    with what it saves: `deepspeed.stage 3 (5.7 GiB of states instead of 11.5)`."""


@documented
@frozen(kw_only=True)
class Mesh:
    """This process's place among the ranks. With one process there is no group and collectives are
    no-ops."""

    rank: int = 0
    """Number of this process, from 0."""
    world: int = 1
    """Number of ranks."""
    local_rank: int = 0
    """Number of this process on its host, from 0."""
    device: torch.device = field(factory=lambda: torch.device("cpu"))
    """Device of this rank."""
    axes: Any = None
    """The torch DeviceMesh with axes (data, sequence, tensor), or None with one process."""
    memory: int = 0
    """Bytes that this rank has on its device (of a host's its share), 0 where nobody knows."""

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce `values` in place over all ranks by addition; collective."""
        if self.world > 1:
            torch.distributed.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """All-reduce `values` in place over all ranks to the greatest; collective."""
        if self.world > 1:
            torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Each rank's picklable `value`, in the order of ranks, on every rank; collective."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Return once every rank has come here; collective."""
        if self.world > 1:
            own = [self.device.index] if self.device.type == "cuda" else None
            torch.distributed.barrier(device_ids=own)


class Deferred:
    """A copy of `values` [K] that has been started; `read` waits only for what is not there yet."""

    def __init__(self, values: Tensor) -> None:
        self._event = None
        if values.device.type == "cpu":
            self._host = values.detach().clone()
            return
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values.detach(), non_blocking=True)
        self._event = torch.get_device_module(values.device).Event()
        self._event.record()

    def read(self) -> list[float]:
        """The values as floats."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


@documented
@frozen(kw_only=True)
class StepOutcome:
    """What one optimizer step did."""

    moved: bool
    """False when a gradient was not finite on some rank: no weight has changed."""
    grad_norm: float
    """Norm of the whole gradient before clipping, over all ranks; nan or inf when not moved."""
    skipped_by_scaler: bool = False
    """fp16 only: the dynamic loss scaler lowered its scale and skipped; training goes on."""

    def read(self) -> "StepOutcome":
        """Itself: nothing is on its way any more."""
        return self


@documented
@frozen
class LaterOutcome:
    """What a step did, on its way from a device that keeps a gradient which is not finite away from
    every weight by itself. The loop reads it once the next step is under way."""

    norm: Deferred
    """`StepOutcome.grad_norm` [1]."""
    skipped_by_scaler: ClassVar[bool] = False

    def read(self) -> StepOutcome:
        """The outcome; waits for what is not there yet."""
        (value,) = self.norm.read()
        return StepOutcome(moved=math.isfinite(value), grad_norm=value)


class Engine(Protocol):
    """A model prepared by a backend. The only source of truth for stage, precision and device."""

    module: Any
    """The `rlhf.model.packed.PackedModel` that was prepared, unwrapped. Who reads weights outside
    of a forward asks for it after each step anew: some may still be on their way from other
    ranks."""
    role: str
    stage: int
    precision: str
    device: torch.device

    def __call__(self, batch: PackedBatch, readout: Readout) -> Mapping[str, Tensor]:
        """Run the wrapped forward; collective at stage 3."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss` (a scalar). Gradients add over micro-batches and over ranks:
        the backend undoes any averaging of its own. `last` marks the step's last micro-batch.
        Collective."""

    def step(self) -> StepOutcome | LaterOutcome:
        """Clip, update, clear the gradients, advance the schedule. Never lets a non-finite gradient
        reach a weight. Collective."""

    def train(self) -> None:
        """Dropout and recomputation on."""

    def eval(self) -> None:
        """Dropout and recomputation off."""


def on_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers, or rows of them, as a tensor on `device`; `torch.tensor(..., device=...)` would wait
    for it."""
    host = torch.tensor(values)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


@cache
def fused_on(kind: str) -> bool:
    """Whether a kind of device ("cuda", "cpu") runs kernels written in Triton. The meta device, on
    which a run is rehearsed, speaks for the machine's accelerator."""
    if kind == "meta":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return kind == "cuda" and find_spec("triton") is not None
