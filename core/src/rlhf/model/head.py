"""The step from hidden states to logits: weight, bias, scale and soft cap of each family."""

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor, nn

from rlhf.config.field_docs import documented
from rlhf.engine import Axis
from rlhf.model.parts import output_layer
from rlhf.model.task import label_head


@documented
@frozen(kw_only=True)
class Head:
    """logits = cap(scale * (hidden @ weight.T + bias)), with cap(x) = softcap * tanh(x /
    softcap)."""

    weight: Tensor
    """Weight [V, H]; of a classifier [labels, H]."""
    bias: Tensor | None = None
    """Bias [V]."""
    scale: float = 1.0
    """Factor on the logits."""
    softcap: float | None = None
    """Bound of the logits, which are squashed by tanh; None if there is none."""
    extra: Mapping[str, Tensor] = field(factory=dict)
    """The trainer's own parameters (`extra` of `Run.load`)."""
    sequence: Axis = field(factory=Axis)
    """Ranks that have the same hidden states and divide the predictions."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] of `hidden` [N, H] in float32. Only for a few rows: all logits
        exist at once."""
        raw = nn.functional.linear(hidden, self.weight, self.bias).float() * self.scale
        return soft_capped(raw, self.softcap)

    def in_float32(self) -> "Head":
        """Return the head with weight and bias in float32. Only for a few labels."""
        bias = None if self.bias is None else self.bias.float()
        return evolve(self, weight=self.weight.float(), bias=bias)

    def first(self, tokens: int) -> "Head":
        """Return the head that computes only the logits of the first so many tokens."""
        bias = None if self.bias is None else self.bias[:tokens]
        return evolve(self, weight=self.weight[:tokens], bias=bias)

    def rows(self, tokens: Tensor) -> "Head":
        """Return the head that computes only the logits of `tokens` [L]."""
        bias = None if self.bias is None else self.bias.index_select(0, tokens)
        return evolve(self, weight=self.weight.index_select(0, tokens), bias=bias)


def soft_capped(values: Tensor, softcap: float | None) -> Tensor:
    """Return softcap * tanh(values / softcap), or `values` without a cap."""
    return values if softcap is None else softcap * torch.tanh(values / softcap)


@frozen(kw_only=True)
class LogitForm:
    """What a model does with the products of its head, `hidden @ weight.T + bias`."""

    scale: float = 1.0
    softcap: float | None = None


KNOWN = (2.0**-10, 2.0**20)
"""Products for which `logit_form` reads a model's logits: one that no cap changes, and one that
every cap does. As powers of two they leave the digits of a scale as they are."""


def logit_form(causal: Any, tokens: Tensor, hidden: Tensor) -> LogitForm:
    """Return what a causal LM does between its last hidden state and its logits.

    It is read from the logits of `tokens` [L], for which the decoder returns `hidden` [L, H] and
    the head returns KNOWN here. So it does not depend on how a family names its multipliers,
    divisors and caps. Whether the form describes the model at all, other logits have to show.
    """
    before = 1.0

    def replace(_: nn.Module, inputs: tuple[Tensor, ...], products: Tensor) -> Tensor:
        nonlocal before
        own, given = hidden.flatten().float(), inputs[0].flatten().float()
        ratio = float((given @ own) / (own @ own))
        # Hidden states in 16 bits give it with an error.
        before = 1.0 if abs(ratio - 1) < 1e-2 else float(f"{ratio:.6g}")
        known = torch.zeros_like(products, dtype=torch.float32)
        known[..., : len(KNOWN)] = known.new_tensor(KNOWN)
        return known

    hook = output_layer(causal).register_forward_hook(replace)
    try:
        logits = causal(input_ids=tokens[None], use_cache=False).logits
    finally:
        hook.remove()
    small, large = (float(value) for value in logits.flatten()[: len(KNOWN)])
    scale = small / KNOWN[0]
    capped = abs(large) < abs(0.5 * scale * KNOWN[1])
    return LogitForm(scale=before * scale, softcap=abs(large) if capped else None)


def read_head(causal: nn.Module) -> Head:
    """Return weight and bias of the head of a transformers causal LM, or of a classifier (weight
    [labels, H]). At ZeRO-3 only inside a forward, where the weight is gathered."""
    if labels := label_head(causal):
        linear: Any = labels[1]
        return Head(weight=linear.weight, bias=linear.bias)
    output = output_layer(causal)
    return Head(weight=output.weight, bias=getattr(output, "bias", None))
