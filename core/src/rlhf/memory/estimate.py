"""The memory of a step on one accelerator, estimated before any weight is read."""

from collections.abc import Mapping

from attrs import frozen

from rlhf.engine import gib


@frozen(kw_only=True)
class Estimate:
    """Bytes on one accelerator. States come from the backend's arithmetic, everything else from a
    step that was rehearsed without values."""

    states: Mapping[str, Mapping[str, int]]
    """By role: `weights`, `gradients`, `optimizer`, `buffers`."""
    updating: int
    """Transient bytes of the optimizer's step, when no activation is left."""
    activations: int
    """Bytes that the largest micro-batch keeps for backward."""
    passing: int
    """Transient peak above `activations`: the head's logits, gradients of activations."""
    tokens: int
    """Number of tokens of that micro-batch."""
    accumulates: bool = True
    """Whether a step has several micro-batches, so that gradients exist beside activations."""
    growing: int = 0
    """Peak of a step of one micro-batch: the gradients so far and what backward still needs."""

    @property
    def resident(self) -> int:
        """Bytes that stay from step to step, over all roles."""
        return sum(sum(parts.values()) for parts in self.states.values())

    @property
    def peak(self) -> int:
        """Bytes of all tensors at the peak of a step."""
        return self.resident + max(self._pass, self.updating)

    @property
    def _pass(self) -> int:
        """Bytes that forward and backward add to `resident`, whose gradients may not exist yet."""
        passing = self.activations + self.passing
        if self.accumulates:
            return passing
        return max(passing, self.growing) - self.states["policy"].get("gradients", 0)

    def __str__(self) -> str:
        """Return one line, in GiB."""
        policy = dict(self.states["policy"])
        parts = {"activations": self.activations, "head": self.passing}
        if self.updating > self._pass:
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
        """Return the tokens of the largest micro-batch that fits `total` bytes, or 0."""
        if self.resident + self.updating > total:
            return 0
        room = total - self.resident
        return int(self.tokens * room / max(self.activations + self.passing, 1))

    def peak_with(self, tokens: int) -> int:
        """Return the peak with micro-batches of so many tokens."""
        passing = (self.activations + self.passing) * tokens // self.tokens
        return self.resident + max(passing, self.updating)
