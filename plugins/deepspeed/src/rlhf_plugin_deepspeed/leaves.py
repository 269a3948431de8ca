"""The modules that ZeRO-3 gathers as one: decoder layers, and blocks of experts.

DeepSpeed reduces the gradients of such a leaf with every run of it, and fails where one runs twice
before backward. Experts need that, for one that no token reaches has no gradient. Losses with two
passes run layers twice, so their gradients are reduced parameter by parameter, after all runs.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import set_z3_leaf_module, set_z3_leaf_modules_by_name
from torch import nn

from rlhf_plugin_deepspeed.patches.install import replace

MARK = "ds_z3_leaf_module"
"""The attribute by which DeepSpeed knows that a parameter belongs to a leaf."""


def mark_layers(model: nn.Module, patches: Collection[str]) -> list[nn.Module]:
    """Make the decoder's layers leaves for ZeRO-3 and return them: none where layers share weights,
    and in a model that is trained none with experts or without the patch `leaf-layers`."""
    trained = any(parameter.requires_grad for parameter in model.parameters())
    if trained and (expert_blocks(model) or "leaf-layers" not in patches):
        return []
    layers = decoder_layers(model)
    for layer in layers:
        set_z3_leaf_module(layer, True)
    return layers


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the largest list in `model`; none where they share weights."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers: nn.ModuleList = max(lists, key=_size, default=nn.ModuleList())
    shared = sum(_size(layer) for layer in layers) > _size(layers)
    return [] if shared else list(layers)


@contextmanager
def reduced_by_parameter(layers: list[nn.Module]) -> Iterator[None]:
    """Let DeepSpeed's initialization reduce the gradients of these leaves one by one."""
    if not layers:
        yield
        return
    register = DeepSpeedZeroOptimizer_Stage3.create_reduce_and_remove_grad_hooks

    def create_reduce_and_remove_grad_hooks(self: DeepSpeedZeroOptimizer_Stage3) -> None:
        for layer in layers:
            for parameter in layer.parameters():
                vars(parameter).pop(MARK, None)
        register(self)

    with replace(
        "leaf-layers",
        DeepSpeedZeroOptimizer_Stage3,
        create_reduce_and_remove_grad_hooks=create_reduce_and_remove_grad_hooks,
    ):
        yield


def _size(module: nn.Module) -> int:
    return sum(getattr(item, "ds_numel", item.numel()) for item in module.parameters())


def mark_experts(model: nn.Module) -> list[str]:
    """Make every block of experts a leaf for ZeRO-3 and return their names. With hooks on each
    expert, a rank whose tokens skip one would not join its gathering and all would hang."""
    blocks = expert_blocks(model)
    set_z3_leaf_modules_by_name(model, blocks)
    return blocks


def expert_blocks(model: nn.Module) -> list[str]:
    """Return the names of modules that hold a list of experts, or one 3-D weight [experts, ...]. A
    decoder layer that holds its experts itself does not count: it would be gathered as a whole."""
    return [name for name, module in model.named_modules() if name and _is_block(module)]


def _is_block(module: nn.Module) -> bool:
    children = dict(module.named_children())
    if "base_layer" in children:
        # peft's adapter of stacked weights, which reads its own weights and theirs together.
        return _is_block(children["base_layer"])
    if any(type(child).__name__.endswith("Norm") for child in children.values()):
        return False
    lists = any(
        "expert" in name and isinstance(child, nn.ModuleList) and len(child) > 1
        for name, child in children.items()
    )
    shapes = [getattr(item, "ds_shape", item.shape) for item in module.parameters(recurse=False)]
    # Convolutions have 3-D weights too.
    is_convolution = isinstance(module, nn.modules.conv._ConvNd)
    return lists or (not is_convolution and any(len(shape) == 3 for shape in shapes))
