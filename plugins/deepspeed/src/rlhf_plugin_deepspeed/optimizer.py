"""Optimizers by `optim.name`. AdamW (arXiv 1711.05101) is torch's fused one, on the CPU too, where
it is as fast as DeepSpeed's, which has to be compiled."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from deepspeed.ops.adam import FusedAdam
from torch import nn
from torch.optim import AdamW, Optimizer

from rlhf.plugin import Config, OptimConfig
from rlhf_optim import RULES, FirstMomentOptimizer, RoundedAdamW
from rlhf_plugin_deepspeed.kinds import TITLES
from rlhf_plugin_deepspeed.muon import Muon, hidden_matrices

TORCH = "torch AdamW (fused)"
ROUNDED = "AdamW in bf16 with stochastic rounding"


def title(config: OptimConfig) -> str:
    """Return what the first lines of a run call the optimizer."""
    return TITLES.get(config.name, ROUNDED if config.states == "bf16" else TORCH)


class FlatAdamW(FusedAdam, AdamW):
    """torch's AdamW as a FusedAdam, for which DeepSpeed keeps flat masters at stage 0: they make a
    step at 1.5B a tenth faster. FusedAdam's own step takes as long as torch's (12.6 and 12.3 ms on
    an H200), and its operator is compiled for most of a minute."""

    def __init__(self, groups: Sequence[dict[str, Any]], **settings: Any) -> None:
        AdamW.__init__(self, groups, fused=True, weight_decay=0.0, **settings)

    step, zero_grad = AdamW.step, AdamW.zero_grad


def build(groups: Sequence[Mapping[str, Any]], model: nn.Module, config: Config) -> Optimizer:
    """Return the optimizer of `groups`, the trained parameters of `model`."""
    optim = config.optim
    settings: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas}
    if rule := RULES.get(optim.name):
        return FirstMomentOptimizer(groups, rule=rule, **settings)
    settings["eps"] = optim.eps
    if optim.name == "muon":
        return Muon(groups, matrices=hidden_matrices(model), **settings)
    if optim.states == "bf16":
        return RoundedAdamW(groups, seed=config.train.seed, **settings)
    return FlatAdamW([dict(group) for group in groups], **settings)


def forget_first_step(optimizer: Optimizer) -> None:
    """Undo DeepSpeed's step at start-up, at stage 0 in bf16 and fp16. It would count in Adam's bias
    correction: the loss at step 4 was 1.477 instead of 1.293."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group.pop("step", None)


@contextmanager
def rate_zero(optimizer: Optimizer) -> Iterator[None]:
    """Set learning rates to 0, so that a step that DeepSpeed takes at start-up decays nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    yield
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
