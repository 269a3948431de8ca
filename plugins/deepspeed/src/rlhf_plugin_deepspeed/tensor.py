"""Tensor parallelism: linear layers divided over the ranks of the tensor axis, after Megatron-LM
(arXiv 1909.08053, section 3).

Which layers, and how, is transformers' own plan of a family (`base_model_tp_plan` of its config).
Weights stay plain tensors, so that ZeRO, peft and the kernels need not know. DeepSpeed's AutoTP
replaces modules, so it does not reach peft's adapters and models without an engine.
"""

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen
from deepspeed.accelerator import get_accelerator
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable

from rlhf.engine import Axis, Mesh, ModelShape, replace_forward
from rlhf.errors import RLHFError

DIMS = {"colwise": 0, "rowwise": 1}
"""The dimension of a weight [out, in] that a style divides."""
PARTIAL = {"colwise": "lora_A", "rowwise": "lora_B"}
"""The factor of an adapter that stays whole: its gradient is a sum over the axis."""
PART = "tensor_part"


@frozen(eq=False)
class Part:
    """This rank's part of a parameter, equal in size on all ranks of the axis."""

    axis: Axis
    dim: int
    shape: torch.Size
    """Of the whole parameter."""

    @property
    def size(self) -> int:
        """Number of elements of a part."""
        return self.shape.numel() // self.axis.size

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole parameter."""
        return whole.chunk(self.axis.size, self.dim)[self.axis.rank].clone()

    def whole(self, part: Tensor) -> Tensor:
        """Return the whole parameter. Collective."""
        # NCCL has no operations on the host, where the optimizer's states may be.
        own = part.to(get_accelerator().current_device_name()).contiguous()
        parts = [torch.empty_like(own) for _ in range(self.axis.size)]
        distributed.all_gather(parts, own, group=self.axis.group)
        return torch.cat(parts, self.dim).to(part.device)


def check_divides(shape: ModelShape, mesh: Mesh, *, path: str) -> None:
    """Raise RLHFError unless the tensor axis can divide the layers of a model."""
    size, most = mesh.tensor.size, shape.tensor
    if most % size == 0:
        return
    if most == 1:
        raise RLHFError(
            f"deepspeed.tensor_parallel is {size}, but the layers of {path} cannot be divided: "
            f"{shape.undivided}; set deepspeed.stage to 3 instead"
        )
    both = math.gcd(most, mesh.world)
    sizes = [str(each) for each in range(1, both + 1) if both % each == 0]
    raise RLHFError(
        f"deepspeed.tensor_parallel is {size}, which does not divide the heads and the "
        f"feed-forward layers of {path}; set it to {' or '.join(sizes)}"
    )


def shape_of_part(shape: ModelShape, size: int) -> ModelShape:
    """Return what one of `size` ranks has: embedding, head, and its part of divisible layers."""
    if shape.tensor % size:
        return shape
    ends = shape.head + shape.lookup
    parameters = ends + (shape.parameters - ends) // size
    return evolve(shape, parameters=parameters, trainable=min(shape.trainable, parameters))


def part_of(parameter: Tensor) -> Part | None:
    """Return which part of a parameter this rank has; None for a whole one."""
    return getattr(parameter, PART, None)


def divide(model: nn.Module, axis: Axis) -> None:
    """Divide the layers of `model` over the ranks of `axis`, in place."""
    shared = Shared(axis)
    for module, style in planned(model):
        if style == "colwise":
            module.register_forward_pre_hook(shared)
        elif style == "rowwise":
            linear: Any = getattr(module, "base_layer", module)
            if linear.bias is not None:
                # Added once, to the sum.
                replace_forward(linear, partial(_product, linear))
            module.register_forward_hook(partial(_add_up, axis, linear))
            module.register_forward_pre_hook(shared.release)
        for name, parameter in module.named_parameters():
            _divide(name, parameter, style, axis)


def planned(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules of the family's plan with their style."""
    configs = (getattr(part, "config", None) for part in model.modules())
    plans = (getattr(config, "base_model_tp_plan", None) for config in configs)
    plan: Mapping[str, str] = next(filter(None, plans), {})
    styles = [
        (re.compile(r"(.*\.)?" + re.escape(name).replace(r"\*", r"\d+")), style)
        for name, style in plan.items()
    ]
    for name, module in model.named_modules():
        for pattern, style in styles:
            if pattern.fullmatch(name):
                yield module, style


def _divide(name: str, parameter: nn.Parameter, style: str, axis: Axis) -> None:
    if style not in DIMS or PARTIAL[style] in name:
        if parameter.requires_grad:
            parameter.register_hook(partial(_summed, axis))
    elif style == "colwise" or parameter.ndim > 1:
        part = Part(axis, DIMS[style], parameter.shape)
        parameter.data = part.of(parameter.data)
        setattr(parameter, PART, part)
        # DeepSpeed's norms count every other parameter on the first rank only.
        parameter.model_parallel = True  # type: ignore[attr-defined]


class Shared:
    """The input of divided layers: readers of one tensor share the sum of its gradient."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        value, *others = inputs
        if torch.is_grad_enabled() and value.requires_grad:
            if self._last is None or self._last[0] is not value:
                self._last = (value, with_summed_gradient(value, self._axis))
            value = self._last[1]
        return value, *others

    def release(self, *_: Any) -> None:
        """Forget the input, after the layer that follows its readers."""
        self._last = None


def with_summed_gradient(value: Tensor, axis: Axis) -> Tensor:
    """Return a view of `value` whose gradient is summed over the axis."""
    shared = value.view_as(value)
    shared.register_hook(partial(_summed, axis))
    return shared


class Sum(torch.autograd.Function):
    """The sum over the axis, whose gradient is the same for every term."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis) -> Tensor:
        return _summed(axis, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _product(linear: nn.Linear, value: Tensor) -> Tensor:
    return nn.functional.linear(value, linear.weight)


def _add_up(
    axis: Axis, linear: nn.Linear, module: nn.Module, inputs: Any, output: Tensor
) -> Tensor:
    total: Tensor = Sum.apply(output, axis)
    return total if linear.bias is None else total + linear.bias


def _summed(axis: Axis, value: Tensor) -> Tensor:
    # A copy: the tensor may be another's too.
    return axis.sum(value.clone(memory_format=torch.contiguous_format))
