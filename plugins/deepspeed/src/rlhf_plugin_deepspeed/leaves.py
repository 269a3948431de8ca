"""Blocks of experts under ZeRO-3: gathered as one, since ranks send their tokens to different
experts."""

from deepspeed.utils import set_z3_leaf_module
from torch import nn


def mark_experts(model: nn.Module) -> list[str]:
    """Make every block of experts a leaf for ZeRO-3; returns their names.

    With hooks on each expert, a rank whose tokens skip an expert would not join its gathering and
    all would hang.
    """
    blocks = expert_blocks(model)
    for name in blocks:
        set_z3_leaf_module(model.get_submodule(name), True)
    return blocks


def expert_blocks(model: nn.Module) -> list[str]:
    """Names of the modules that hold experts, found by structure and never by class name.

    A block holds a list of experts, or one 3-D weight [experts, ...]. A decoder layer that holds
    its experts itself is none: as a leaf it would gather attention and norms with them.
    """
    return [name for name, module in model.named_modules() if name and _is_block(module)]


def _is_block(module: nn.Module) -> bool:
    children = dict(module.named_children())
    if any(type(child).__name__.endswith("Norm") for child in children.values()):
        return False
    lists = any(
        "expert" in name and isinstance(child, nn.ModuleList) and len(child) > 1
        for name, child in children.items()
    )
    return lists or _has_stacked_weight(module)


def _has_stacked_weight(module: nn.Module) -> bool:
    # Convolutions have 3-D weights too.
    if isinstance(module, nn.modules.conv._ConvNd):
        return False
    shapes = [getattr(item, "ds_shape", item.shape) for item in module.parameters(recurse=False)]
    return any(len(shape) == 3 for shape in shapes)
