"""The memory of a step on one accelerator, estimated before any weight is read."""

import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from operator import itemgetter
from typing import Any

import attrs
import torch
from attrs import frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf.contract.sums import weighted_loss
from rlhf.data.batch import PackedBatch
from rlhf.engine import gib
from rlhf.trainer import Trainer


@frozen
class CountedStep:
    """A survey, and loss and backward of one micro-batch, as they were counted, for any way of
    storing gradients."""

    activations: int
    """Bytes alive when backward begins."""
    peaks: tuple[tuple[int, int, int], ...]
    """Whenever the gradient of a weight is complete, and at the end: bytes at the peak since the
    time before, and elements and bytes of the gradients complete by then."""
    total: int
    """Elements of all trained weights."""
    survey: int = 0
    """Bytes at the peak of the survey, when no gradient exists."""
    images: int = 0
    """Bytes among the activations that the batch would not take without its images."""

    def peak(self, *, reducing: int = 0) -> int:
        """Return the peak of loss and backward while at most `reducing` bytes of gradients wait to
        be reduced. Above `activations` it has the head's logits and gradients of activations."""
        return max(live + min(whole, reducing) for live, _, whole in self.peaks)

    def peak_with_gradients(self, gradients: int) -> int:
        """Return the peak of a step of one micro-batch, with the gradients of weights that are
        complete at each moment; all of them take `gradients` bytes."""
        return max(live + gradients * done // self.total for live, done, _ in self.peaks)


def count_step(
    trainer: Trainer,
    batch: PackedBatch,
    modules: Iterable[torch.nn.Module],
    *,
    surveyed: PackedBatch | None = None,
) -> CountedStep:
    """Run the survey on `surveyed`, by default on `batch`, then loss and backward on `batch`, and
    return what they take. Gradients of weights are released at once, since they belong to the
    backend."""
    weights = [weight for module in modules for weight in module.parameters()]
    trained = [weight for weight in weights if weight.requires_grad]
    total = sum(weight.numel() for weight in trained)
    with LiveBytes(known=weights) as counter, ExitStack() as hooks:
        peaks, survey = list[tuple[int, int, int]](), 0
        complete = {"numel": 0, "nbytes": 0}

        def look() -> None:
            peaks.append((counter.take_peak(), complete["numel"], complete["nbytes"]))

        def release(weight: Tensor) -> None:
            look()
            complete["numel"] += weight.numel()
            complete["nbytes"] += weight.nbytes
            weight.grad = None
            counter.take_peak()

        for weight in trained:
            hooks.callback(weight.register_post_accumulate_grad_hook(release).remove)
        if trainer.needs_survey():
            with torch.no_grad():
                values = dict(trainer.survey(surveyed or batch))
            batch = attrs.evolve(batch, step=values | _positions(batch))
            survey = counter.take_peak()
        loss = trainer.loss(batch)
        activations = counter.live
        weighted_loss(loss, {term.per: 1.0 for term in loss.terms}).backward()
        look()
    return CountedStep(activations, tuple(peaks), total, survey)


class LiveBytes(TorchDispatchMode):
    """Counts the storages that are made while the mode is on and still alive, on any device
    including meta. Storages of `known` tensors do not count."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        """Bytes alive now."""
        self._peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(
            tensor.untyped_storage() for tensor in known
        )

    def take_peak(self) -> int:
        """Return the most bytes that were alive at one time since the last call."""
        peak, self._peak = self._peak, self.live
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta:
            # Experts of any dtype run on a device, but on the meta device torch wants bf16.
            matrices = (matrix.to(torch.bfloat16) for matrix in args[:2])
            result = func(*matrices, *args[2:], **(kwargs or {})).to(args[0].dtype)
        else:
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(storage)
        weakref.finalize(storage, self._free, size).atexit = False
        self.live += size
        self._peak = max(self._peak, self.live)

    def _free(self, size: int) -> None:
        self.live -= size


def _positions(batch: PackedBatch) -> dict[str, Tensor]:
    """Return positions of the batch's examples and answers among surveyed values."""
    sizes = {"examples": batch.num_examples, "answers": batch.num_answers}
    device = batch.tokens.device
    return {name: torch.zeros(n, dtype=torch.long, device=device) for name, n in sizes.items()}


@frozen(kw_only=True)
class Estimate:
    """Bytes on one accelerator. States come from the backend's arithmetic, everything else from a
    step that was rehearsed without values."""

    states: Mapping[str, Mapping[str, int]]
    """By role: `weights`, `gradients`, `masters`, `optimizer`, `buffers`."""
    updating: int
    """Transient bytes of the optimizer's step, when no activation is left."""
    step: CountedStep
    """The survey, and loss and backward, each on its largest micro-batch."""
    reducing: int = 0
    """Bytes of gradients that are whole until they are reduced."""
    tokens: int
    """Number of tokens of the loss's micro-batch."""
    accumulates: bool = True
    """Whether a step has several micro-batches: gradients then exist together with activations."""
    host: int = 0
    """Bytes in host memory, of one rank."""
    nvme: int = 0
    """Bytes in files of the optimizer's states, of one rank."""
    images: int = 0
    """Bytes of the images of all micro-batches of a step."""

    @property
    def resident(self) -> int:
        """Bytes that stay from step to step, over all roles."""
        return self.images + sum(sum(parts.values()) for parts in self.states.values())

    @property
    def peak(self) -> int:
        """Bytes of all tensors at the peak of a step."""
        return self.resident + max(self._pass, *self._beside.values())

    @property
    def step_peak(self) -> int:
        """Bytes at the peak of loss and backward."""
        return self.step.peak(reducing=self.reducing)

    @property
    def _pass(self) -> int:
        """Bytes that forward and backward add to `resident`, whose gradients may not exist yet."""
        if self.accumulates:
            return self.step_peak
        return max(self.step_peak, self.step.peak_with_gradients(self.gradients)) - self.gradients

    @property
    def _beside(self) -> dict[str, int]:
        """Bytes that the parts of a step before the loss and after backward add to `resident`."""
        return {"survey": self.step.survey - self.gradients, "optimizer's step": self.updating}

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of all roles."""
        return sum(parts.get("gradients", 0) for parts in self.states.values())

    def parts(self) -> dict[str, int]:
        """Return the bytes at the peak by part, which add up to `peak`."""
        step, states = self.step, {role: dict(parts) for role, parts in self.states.items()}
        parts = {"activations": step.activations, "head": self.step_peak - step.activations}
        without_gradients = not self.accumulates
        growing = step.peak_with_gradients(self.gradients)
        name, most = max(self._beside.items(), key=itemgetter(1))
        if most > self._pass:
            without_gradients = name == "survey"
            parts = {name: step.survey if without_gradients else self.updating}
        elif without_gradients and growing > self.step_peak:
            parts = {"gradients": self.gradients, "activations": growing - self.gradients}
        if images := self.images + (step.images if "activations" in parts else 0):
            parts |= {"activations": parts.get("activations", 0) + self.images - images}
            parts["images"] = images
        if without_gradients:
            for each in states.values():
                each.pop("gradients", 0)
        policy = states.pop("policy")
        others = {role: sum(each.values()) for role, each in states.items()}
        return policy | others | parts

    def __str__(self) -> str:
        """Return one line, in GiB."""
        shown = ", ".join(f"{name} {gib(size)}" for name, size in self.parts().items() if size)
        return f"{gib(self.peak)} GiB at the peak: {shown} ({self.tokens:,} tokens at once)"

    def peak_with(self, tokens: int) -> int:
        """Return the peak with micro-batches of so many tokens."""
        most = self.step_peak * tokens // self.tokens
        return self.resident + max(most, *self._beside.values())
