"""The memory of a step on one accelerator, estimated before any weight is read."""

from collections.abc import Mapping
from operator import itemgetter

from attrs import frozen

from rlhf.engine import gib
from rlhf.memory.step_bytes import CountedStep


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

    @property
    def resident(self) -> int:
        """Bytes that stay from step to step, over all roles."""
        return sum(sum(parts.values()) for parts in self.states.values())

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
