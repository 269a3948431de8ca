"""The norm of the whole gradient, in one launch."""

import itertools
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, distributed, nn


def whole_norm(module: nn.Module) -> Tensor:
    """Return the norm of the gradient at stage 0, where every rank holds all of it. DeepSpeed has
    none without masters, and with torch's optimizer in fp16 a scaled one."""
    norms = torch._foreach_norm(gradients(module), 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))


def gradients(module: nn.Module) -> list[Tensor]:
    """Return the gradients of all trained parameters; where a step gave none, zeros, which
    DeepSpeed uses too when it adds gradients up over ranks."""
    trained = [item for item in module.parameters() if item.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [item.grad for item in trained if item.grad is not None]


def sharded_norm(optimizer: Any) -> Tensor:
    """Return the norm of the gradient over the shards of all ranks, stages 1 to 3. Collective.

    DeepSpeed's own copies each parameter's gradient to float64, in three launches.
    """
    groups = optimizer.averaged_gradients.values()
    every = itertools.chain.from_iterable(groups)
    shards = [item for item in every if not getattr(item, "_zero_padding", False)]
    total = torch.zeros((), dtype=torch.float32, device=get_accelerator().current_device_name())
    if shards:
        norms = torch._foreach_norm(shards, 2, dtype=torch.float32)
        total += torch.stack(list(norms)).square().sum()
    distributed.all_reduce(total, group=optimizer.dp_process_group)
    return total.sqrt()
