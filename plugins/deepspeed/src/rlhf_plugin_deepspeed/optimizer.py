"""Optimizers by `optim.name`. AdamW (arXiv 1711.05101) is torch's; on the CPU for an accelerator it
is DeepSpeed's compiled one, where that can be built."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from torch import nn
from torch.optim import AdamW, Optimizer

from rlhf.engine import Plan
from rlhf.plugin import Config, OptimConfig
from rlhf_plugin_deepspeed.building import compiled
from rlhf_plugin_deepspeed.first_moment import RULES, FirstMomentOptimizer
from rlhf_plugin_deepspeed.muon import Muon, hidden_matrices
from rlhf_plugin_deepspeed.partial import PartialCPUAdam, host_share
from rlhf_plugin_deepspeed.rounding import RoundedAdamW

TORCH = "torch AdamW (fused)"
ROUNDED = "AdamW in bf16 with stochastic rounding"
TITLES = {"lion": "Lion", "muon": "Muon with AdamW", "sgd": "SGD with momentum"}


def choose(config: OptimConfig, *, offloaded: bool) -> tuple[str, str]:
    """Return the optimizer's name, and for `offloaded` states why it is not DeepSpeed's."""
    if config.name in TITLES:
        return TITLES[config.name], ""
    if config.states == "bf16":
        return ROUNDED, ""
    problem = compiled("CPUAdamBuilder") if offloaded else ""
    return ("DeepSpeedCPUAdam" if offloaded and not problem else TORCH), problem


class FlatAdamW(FusedAdam, AdamW):
    """torch's AdamW as a FusedAdam, for which DeepSpeed keeps flat masters at stage 0: they make a
    step at 1.5B a tenth faster. FusedAdam's own step takes as long as torch's (12.6 and 12.3 ms on
    an H200), and its operator is compiled for most of a minute."""

    def __init__(self, groups: Sequence[dict[str, Any]], **settings: Any) -> None:
        AdamW.__init__(self, groups, fused=True, weight_decay=0.0, **settings)

    step, zero_grad = AdamW.step, AdamW.zero_grad


def build(
    groups: Sequence[Mapping[str, Any]], model: nn.Module, config: Config, plan: Plan
) -> Optimizer:
    """Return the optimizer of `groups`, the trained parameters of `model`."""
    optim, offloaded = config.optim, "offload_optimizer" in plan.settings["zero_optimization"]
    settings: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas}
    if rule := RULES.get(optim.name):
        return FirstMomentOptimizer(groups, rule=rule, **settings)
    settings["eps"] = optim.eps
    if optim.name == "muon":
        return Muon(groups, matrices=hidden_matrices(model), **settings)
    name, _ = choose(optim, offloaded=offloaded)
    if name == ROUNDED:
        return RoundedAdamW(groups, seed=config.train.seed, **settings)
    if name == "DeepSpeedCPUAdam" and host_share(plan.settings["zero_optimization"]) < 1:
        return PartialCPUAdam(groups, **settings)
    if name == "DeepSpeedCPUAdam":
        return DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
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


def replay_steps(optimizer: Optimizer) -> None:
    """Advance DeepSpeedCPUAdam's hidden counter to the step of its loaded state. It keeps beta^t as
    a running float product, which a loaded state does not hold and pow(beta, t) does not equal."""
    if not isinstance(optimizer, DeepSpeedCPUAdam):
        return
    steps = max((int(state["step"]) for state in optimizer.state.values()), default=0)
    group = optimizer.param_groups[0]
    beta1, beta2 = group["betas"]
    scrap = [torch.zeros(1) for _ in range(4)]
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id, step, 0.0, beta1, beta2, group["eps"], 0.0, True, *scrap
        )
