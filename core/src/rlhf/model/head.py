"""The step from hidden states to logits: weight, bias, scale and soft cap of each family."""

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor, nn

from rlhf.config.field_docs import documented
from rlhf.engine import Axis
from rlhf.model.task import label_head

MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Config fields by which logits are multiplied: Cohere, Falcon-H1, and models with
mu-parametrisation."""

DIVISOR = "logits_scaling"
"""Config field by which logits are divided (Granite), except in the families below."""

MULTIPLY_BY_DIVISOR = ("hyperclovax",)
"""`model_type`s that multiply by `logits_scaling`."""


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


def read_head(causal: nn.Module) -> Head:
    """Return the head of a transformers causal LM, or of a classifier (weight [labels, H]). At
    ZeRO-3 only inside a forward, where the weight is gathered."""
    if labels := label_head(causal):
        linear: Any = labels[1]
        return Head(weight=linear.weight, bias=linear.bias)
    output = causal.get_output_embeddings()  # type: ignore[operator]
    config = causal.config.get_text_config()  # type: ignore[union-attr, operator]
    return Head(
        weight=output.weight,
        bias=getattr(output, "bias", None),
        scale=logit_scale(config),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def logit_scale(config: Any) -> float:
    """Return the factor between the head's product and the model's logits."""
    scale = 1.0
    for name in MULTIPLIERS:
        value = getattr(config, name, None)
        scale *= 1.0 if value is None else float(value)
    divisor = getattr(config, DIVISOR, None)
    if divisor is None:
        return scale
    return scale * divisor if config.model_type in MULTIPLY_BY_DIVISOR else scale / divisor
