"""Optimizers by `optim.name`. AdamW (arXiv 1711.05101) is DeepSpeed's compiled one, or torch's
where that cannot be built."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
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
    """Return the optimizer's name, and the reason where it is not DeepSpeed's AdamW; the same on
    every rank of a host."""
    if config.name in RULES:
        return TITLES[config.name], ""
    if config.states == "bf16":
        return ROUNDED, ""
    if not offloaded and get_accelerator().device_name() == "cpu":
        # DeepSpeed's FusedAdam for the CPU takes a compiler and 40 s; torch's needs neither and is
        # as fast.
        return TORCH, ""
    name = "DeepSpeedCPUAdam" if offloaded else "FusedAdam"
    problem = compiled(f"{name.removeprefix('DeepSpeed')}Builder")
    return (TORCH, problem) if problem else (name, "")


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
    if name == "FusedAdam":
        return FusedAdam(filled, adam_w_mode=True, **settings)
    return AdamW(filled, fused=True, weight_decay=0.0, **settings)


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
