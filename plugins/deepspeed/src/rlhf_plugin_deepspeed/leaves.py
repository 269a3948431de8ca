"""What ZeRO-3 gathers as one: decoder layers, and blocks of experts, since ranks send their tokens
to different experts."""

from deepspeed.utils import set_z3_leaf_module
from torch import nn


def mark_layers(model: nn.Module) -> None:
    """Make the decoder's layers leaves for ZeRO-3, in a model that is only run.

    DeepSpeed then looks after one module a layer instead of a dozen, each with collectives and
    bookkeeping of its own on the host. It reduces a leaf's gradients with every run of the leaf,
    and fails where one runs twice before backward, so layers that are trained stay as they are.
    """
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for layer in max(lists, key=_size, default=nn.ModuleList()):
        set_z3_leaf_module(layer, True)


def _size(module: nn.Module) -> int:
    return sum(getattr(item, "ds_numel", item.numel()) for item in module.parameters())


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
