"""The load-balancing loss of mixtures of experts, for each example by itself.

transformers computes it over a micro-batch, which makes the curve depend on how rows are divided.
Over an example (as the sequence-wise loss of DeepSeek-V3, arXiv 2412.19437, section 2.1.2) it is a
sum over examples as every other term. For one example both are the same number.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.errors import RLHFError


def router_loss_of(causal: Any, setting: float | None) -> float:
    """Return the coefficient of the router loss of a transformers model: `setting`
    (`model.router_loss`), or the family's own; 0 where no router is trained. Raises RLHFError where
    a `setting` has no effect."""
    config = causal.config.get_text_config()
    routers = nn.ModuleList(router for router, _ in routers_of(causal))
    trained = any(parameter.requires_grad for parameter in routers.parameters())
    trained = trained and hasattr(config, "num_experts_per_tok")
    if setting is None:
        return float(getattr(config, "router_aux_loss_coef", None) or 0.0) if trained else 0.0
    if setting and not trained:
        raise RLHFError(
            f"model.router_loss has no effect: {type(causal).__name__} has no router that is "
            "trained; remove it"
        )
    return setting


def routers_of(causal: Any) -> list[tuple[nn.Module, int]]:
    """Return the routers of a transformers model, each with the position of its logits in what it
    returns, as transformers itself records them."""
    found = []
    for part in causal.modules():
        record = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits")
        if record is not None:
            kind, index = record.target_class, record.index
            found += [(each, index) for each in part.modules() if isinstance(each, kind)]
    return list(dict.fromkeys(found))


@contextmanager
def recorded(routers: Sequence[tuple[nn.Module, int]]) -> Iterator[list[Tensor]]:
    """Yield a list that gets the logits [T, experts] of each router that runs in this context; a
    recomputation in the backward pass is outside of it."""
    logits: list[Tensor] = []
    with ExitStack() as stack:
        for router, index in routers:

            def keep(_: nn.Module, inputs: Any, outputs: Any, *, index: int = index) -> None:
                each = outputs[index] if isinstance(outputs, tuple) else outputs
                logits.append(each.flatten(0, -2))

            stack.callback(router.register_forward_hook(keep).remove)
        yield logits


def balance_loss(logits: Sequence[Tensor], example: Tensor, *, examples: int, top: int) -> Tensor:
    """Return the sum over examples of experts x sum over experts of (share of the choices) x (mean
    probability), both over all layers (arXiv 2101.03961, equations 4 to 6): `logits` [T, experts]
    of each layer and the `example` [T] of each token, -1 for none -> scalar."""
    # Tokens of no example count in a row of their own.
    index = torch.where(example < 0, examples, example)
    num_experts = logits[0].shape[-1]
    choices = logits[0].new_zeros(examples + 1, num_experts, dtype=torch.float32)
    shares = torch.zeros_like(choices)
    for layer in logits:
        probabilities = layer[: len(example)].float().softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(top).indices, 1.0)
        choices = choices.index_add(0, index, chosen)
        shares = shares.index_add(0, index, probabilities)
    # Every token chooses `top` experts.
    tokens = (choices.sum(-1) / top).clamp(min=1)
    loss = num_experts * (choices * shares).sum(-1) / tokens.square()
    return loss[:examples].sum()
