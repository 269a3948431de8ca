"""How DeepSpeed's optimizers find a gradient that is not finite: once, and in every precision."""

from collections.abc import Collection
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, distributed

from rlhf_plugin_deepspeed.patches.install import replace
from rlhf_plugin_deepspeed.tensor import part_of


def check_once(optimizer: Any, patches: Collection[str]) -> None:
    """Patch the checks of `optimizer`, DeepSpeed's at stages 1 to 3."""
    if "check-every-precision" in patches:
        replace("check-every-precision", optimizer, check_grad_overflow=True)
    if "check-by-norm" in patches:
        replace(
            "check-by-norm",
            optimizer,
            check_overflow=lambda partition_gradients=True: None,
            scaled_global_norm=lambda norm_type=2: _host_norm(optimizer),
        )
    if "no-norm" in patches:
        # RoundedAdamW clips, and skips what is not finite, under DeepSpeed's step.
        replace(
            "no-norm",
            optimizer,
            _get_norm_groups=lambda: [torch.ones(())],
            unscale_and_clip_grads=lambda sub_group_id, total_norm: None,
        )


def _host_norm(optimizer: Any) -> Tensor:
    """Return the norm as DeepSpeed expects it, -1 where it is not finite. On the host: DeepSpeed
    reads a norm on the device after the update, which makes the host wait twice."""
    norm = sharded_norm(optimizer)
    return torch.where(norm.isfinite(), norm, -1.0).cpu()


def sharded_norm(optimizer: Any) -> Tensor:
    """Return the norm of the gradient over the shards of all ranks, stages 1 to 3. Collective.
    DeepSpeed's own copies each parameter's gradient to float64, in three launches."""
    shards = []
    for number, group in optimizer.averaged_gradients.items():
        own = [item for item in group if not getattr(item, "_zero_padding", False)]
        if optimizer.model_parallel_rank > 0:
            # What tensor ranks hold alike counts on the first. Padding at the end has no owner.
            owners = optimizer.params_in_partition[number]
            assert 0 <= len(own) - len(owners) <= 1
            own = [it for it, owner in zip(own, owners, strict=False) if part_of(owner)]
        shards += own
    total = torch.zeros((), dtype=torch.float32, device=get_accelerator().current_device_name())
    if shards:
        norms = torch._foreach_norm(shards, 2, dtype=torch.float32)
        total += torch.stack(list(norms)).square().sum()
    distributed.all_reduce(total, group=optimizer.dp_process_group)
    if optimizer.model_parallel_group is not None:
        distributed.all_reduce(total, group=optimizer.model_parallel_group)
    return total.sqrt()
