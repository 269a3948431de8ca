"""torch's linear as it is where ZeRO-3 shards its weights. That curves stay the same is in
test_curves.py."""

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from rlhf_plugin_deepspeed.patches.linear import ShardedLinear, linear, plain_linear


def layer(*, trained=True):
    """A linear layer in float64 whose weight looks like one of ZeRO-3's."""
    torch.manual_seed(0)
    module = nn.Linear(4, 3, dtype=torch.float64)
    module.weight.requires_grad_(trained)
    module.weight.ds_id, module.weight.ds_status = 0, ZeroParamStatus.AVAILABLE
    return module


@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 5, 4)], ids=str)
def test_a_linear_layer_gives_what_torchs_own_gives(shape):
    module = layer()
    hidden = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    inputs = (hidden, module.weight, module.bias)
    output, expected = linear(*inputs), plain_linear(*inputs)
    assert isinstance(output.grad_fn, ShardedLinear._backward_cls)
    assert torch.equal(output, expected)
    gradient = torch.randn_like(output)
    for own, other in zip(
        torch.autograd.grad(output, inputs, gradient),
        torch.autograd.grad(expected, inputs, gradient),
        strict=True,
    ):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 5, 4)], ids=str)
def test_its_result_can_be_changed_in_place(shape):
    module = layer()
    inputs = torch.randn(shape, dtype=torch.float64, requires_grad=True), module.weight, module.bias
    twice = linear(*inputs)
    twice *= 2
    expected = torch.autograd.grad((2 * plain_linear(*inputs)).sum(), inputs)
    for own, other in zip(torch.autograd.grad(twice.sum(), inputs), expected, strict=True):
        torch.testing.assert_close(own, other)


def test_a_layer_that_is_computed_again_gives_the_same_gradients():
    module = layer()
    hidden = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    inputs = (hidden, module.weight, module.bias)
    again = checkpoint(lambda x: linear(x, module.weight, module.bias), hidden, use_reentrant=False)
    found = torch.autograd.grad(again.square().sum(), inputs)
    expected = torch.autograd.grad(plain_linear(*inputs).square().sum(), inputs)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other)


def test_it_accepts_the_names_of_torch():
    module = layer()
    hidden = torch.randn(5, 4, dtype=torch.float64)
    assert linear(input=hidden, weight=module.weight, bias=None).shape == (5, 3)


def test_a_layers_weight_leaves_no_memory_behind():
    module = layer()
    hidden = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    output = linear(hidden, module.weight, module.bias)
    whole = module.weight.data.clone()
    memory = StorageWeakRef(module.weight.untyped_storage())
    module.weight.data = torch.empty(0, dtype=torch.float64)
    assert memory.expired()
    module.weight.data = whole
    output.sum().backward()
    torch.testing.assert_close(hidden.grad, whole.sum(0).expand(2, 5, 4))


def test_a_frozen_layer_keeps_no_input():
    module = layer(trained=False)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    output = linear(hidden, module.weight, module.bias)
    assert output.grad_fn.saved_tensors[0] is None


def test_without_a_gradient_and_with_autocast_it_is_not_ours():
    module = layer().float()
    module.weight.ds_id = 0
    hidden = torch.randn(5, 4)
    with torch.no_grad():
        assert linear(hidden, module.weight, module.bias).grad_fn is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = linear(hidden, module.weight, module.bias)
    assert output.dtype == torch.bfloat16
    assert not isinstance(output.grad_fn, ShardedLinear._backward_cls)
