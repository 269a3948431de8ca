"""What ZeRO-3 gathers as one: decoder layers, and blocks of experts, since ranks send their tokens
to different experts.

DeepSpeed reduces the gradients of such a leaf with every run of it, and fails where one runs twice
before backward. Experts need that, for one that no token reaches has no gradient. Layers are run
twice by losses with two passes, so theirs are reduced parameter by parameter, as in any module that
is no leaf: after all runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import set_z3_leaf_module
from torch import nn

HOOKS = "create_reduce_and_remove_grad_hooks"
"""What registers the reduction in DeepSpeed's optimizer, 0.19.0 to 0.19.8."""
MARK = "ds_z3_leaf_module"
"""What tells it that a parameter is a leaf's."""


def mark_layers(model: nn.Module) -> list[nn.Module]:
    """Make the decoder's layers leaves for ZeRO-3; returns them. None are made where layers share
    weights, and in a model that is trained none where they hold experts.

    DeepSpeed then looks after one module a layer instead of a dozen, each with collectives and
    bookkeeping of its own on the host.
    """
    trained = any(parameter.requires_grad for parameter in model.parameters())
    known = hasattr(DeepSpeedZeroOptimizer_Stage3, HOOKS)
    layers = decoder_layers(model)
    if trained and (expert_blocks(model) or not known):
        return []
    for layer in layers:
        set_z3_leaf_module(layer, True)
    return layers


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of the largest list in `model`; none where they share weights."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers: nn.ModuleList = max(lists, key=_size, default=nn.ModuleList())
    shared = sum(_size(layer) for layer in layers) > _size(layers)
    return [] if shared else list(layers)


@contextmanager
def reduced_by_parameter(layers: list[nn.Module]) -> Iterator[None]:
    """In here DeepSpeed's initialization has the gradients of these leaves reduced one by one."""
    if not layers:
        yield
        return
    own = getattr(DeepSpeedZeroOptimizer_Stage3, HOOKS)

    def register(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
        for layer in layers:
            for parameter in layer.parameters():
                vars(parameter).pop(MARK, None)
        own(optimizer)

    setattr(DeepSpeedZeroOptimizer_Stage3, HOOKS, register)
    try:
        yield
    finally:
        setattr(DeepSpeedZeroOptimizer_Stage3, HOOKS, own)


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
