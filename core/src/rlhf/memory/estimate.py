"""What a step takes of an accelerator's memory, told before any weight is read, and what to change
when it is too much."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf.engine import gib


@frozen(kw_only=True)
class Estimate:
    """Bytes on one accelerator. What stays comes from the backend's arithmetic, what comes and goes
    from a step that was rehearsed without values."""

    states: Mapping[str, Mapping[str, int]]
    """By role: `weights`, `gradients`, `optimizer`, `buffers`."""
    updating: int
    """What the optimizer's step takes for a moment, when no activation is left."""
    activations: int
    """What backward needs of the largest micro-batch."""
    passing: int
    """What comes on top of it for a moment: the head's logits, gradients of activations."""
    tokens: int
    """Tokens of that micro-batch."""
    accumulates: bool = True
    """Whether a step has several micro-batches, so that gradients are there beside activations."""
    growing: int = 0
    """In a step of one micro-batch, the most that gradients so far and what backward still needs
    take together."""

    @property
    def resident(self) -> int:
        """What stays there from step to step, over all roles."""
        return sum(sum(parts.values()) for parts in self.states.values())

    @property
    def peak(self) -> int:
        """The most that tensors take at one time."""
        return self.resident + max(self._beside, self.updating)

    @property
    def _beside(self) -> int:
        """What a pass takes beside what stays, of which gradients may not be there yet."""
        passing = self.activations + self.passing
        if self.accumulates:
            return passing
        return max(passing, self.growing) - self.states["policy"].get("gradients", 0)

    def __str__(self) -> str:
        """One line, in GiB."""
        policy = dict(self.states["policy"])
        parts = {"activations": self.activations, "head": self.passing}
        if self.updating > self._beside:
            parts = {"optimizer's step": self.updating}
        elif not self.accumulates:
            gradients = policy.pop("gradients", 0)
            if self.growing > self.activations + self.passing:
                parts = {"gradients": gradients, "activations": self.growing - gradients}
        others = {
            role: sum(parts.values()) for role, parts in self.states.items() if role != "policy"
        }
        shown = ", ".join(
            f"{name} {gib(size)}" for name, size in (policy | others | parts).items() if size
        )
        return f"{gib(self.peak)} GiB at the peak: {shown} ({self.tokens:,} tokens at once)"

    def tokens_that_fit(self, total: int) -> int:
        """The largest micro-batch that `total` bytes have room for beside what stays, 0 if none."""
        if self.resident + self.updating > total:
            return 0
        room = total - self.resident
        return int(self.tokens * room / max(self.activations + self.passing, 1))

    def peak_with(self, tokens: int) -> int:
        """The peak with micro-batches of so many tokens."""
        passing = (self.activations + self.passing) * tokens // self.tokens
        return self.resident + max(passing, self.updating)


class LiveBytes(TorchDispatchMode):
    """Counts the storages that are made while it is on and not yet gone, on any device, the meta
    device among them."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        """Bytes alive now."""
        self.peak = 0
        """The most there were."""
        self._lately = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(
            tensor.untyped_storage() for tensor in known
        )

    def lately(self) -> int:
        """The most there were since this was last asked."""
        most, self._lately = self._lately, self.live
        return most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        self.peak = max(self.peak, self.live)
        self._lately = max(self._lately, self.live)

    def _free(self, size: int) -> None:
        self.live -= size
