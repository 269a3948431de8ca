"""Optimizers by `optim.name`. AdamW (arXiv 1711.05101) is torch's; on the CPU for an accelerator it
is DeepSpeed's compiled one, where that can be built."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from torch.optim import AdamW, Optimizer

from rlhf.plugin import OptimConfig
from rlhf_plugin_deepspeed.building import compiled
from rlhf_plugin_deepspeed.first_moment import RULES, FirstMomentOptimizer
from rlhf_plugin_deepspeed.rounding import RoundedAdamW

TORCH = "torch AdamW (fused)"
ROUNDED = "AdamW in bf16 with stochastic rounding"
TITLES = {"lion": "Lion", "sgd": "SGD with momentum"}


def choose(config: OptimConfig, *, offloaded: bool) -> tuple[str, str]:
    """Return the optimizer's name, and for `offloaded` states why it is not DeepSpeed's; the same
    on every rank of a host."""
    if config.name in RULES:
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
    groups: Sequence[Mapping[str, Any]], config: OptimConfig, *, offloaded: bool, seed: int
) -> Optimizer:
    """Return the optimizer over the trainable parameters of `groups`; `seed` is for stochastic
    rounding."""
    trainable = [
        {**group, "params": [item for item in group["params"] if item.requires_grad]}
        for group in groups
    ]
    # DeepSpeed drops empty groups later, when a schedule has already counted them.
    filled = [group for group in trainable if group["params"]]
    settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas}
    if rule := RULES.get(config.name):
        return FirstMomentOptimizer(filled, rule=rule, **settings)
    settings["eps"] = config.eps
    name, _ = choose(config, offloaded=offloaded)
    if name == ROUNDED:
        return RoundedAdamW(filled, seed=seed, **settings)
    if name == "DeepSpeedCPUAdam":
        return DeepSpeedCPUAdam(filled, adamw_mode=True, **settings)
    return FlatAdamW(filled, **settings)


def forget_first_step(optimizer: Optimizer) -> None:
    """Undo the step with zero gradients that DeepSpeed takes at start-up, at stage 0 in bf16 and
    fp16.

    It would count in Adam's bias correction: the loss at step 4 was 1.477 instead of 1.293.
    """
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group.pop("step", None)


@contextmanager
def rate_zero(optimizer: Optimizer) -> Iterator[None]:
    """Set learning rates to 0 in this context, so that a step that DeepSpeed takes at start-up does
    not decay a weight."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    yield
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def replay_steps(optimizer: Optimizer) -> None:
    """Advance DeepSpeedCPUAdam's hidden counter to the step of its loaded state.

    It keeps beta^t as a running float product, which a loaded state does not hold and pow(beta, t)
    does not equal.
    """
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
