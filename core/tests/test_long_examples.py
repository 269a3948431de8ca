"""One product per long example, with torch's kernels for the CPU in the place of cuDNN's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.data.packing import blank_batch
from rlhf.model import attention
from rlhf.model.flex import Scoring
from rlhf.model.long_examples import SIZES, Kernel, long_examples
from rlhf.model.masks import LONG, Tree, TreeMask

LENGTHS = (SIZES + 70, SIZES, 300)


def forward(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Any:
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = attend(query, key, value, 0.0, True, scale=scale)
    return output, lse, ()


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
    rest: Any, scale: float | None,
) -> Any:  # fmt: skip
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return attend(gradient, query, key, value, output, lse, 0.0, True, scale=scale)


def tree_of(spans: Any) -> Tree:
    total = sum(prompt + sum(answers) for prompt, answers in spans)
    return Tree(blank_batch(torch.zeros(-(-total // 128) * 128, dtype=torch.long), spans))


def test_each_example_has_the_values_and_gradients_of_a_product_of_its_own() -> None:
    mask = TreeMask(tree_of(tuple((0, (length,)) for length in LENGTHS)), None)
    torch.manual_seed(0)
    size, real = len(mask.tree.owner), sum(LENGTHS)
    assert size > real, "the row has tokens that round it up"
    row = [torch.randn(1, size, 2, 8).transpose(1, 2).requires_grad_() for _ in range(3)]
    weights = torch.randn(1, 2, size, 8)
    weights[:, :, real:] = 0
    ours = long_examples(*row, LENGTHS, 0.3, Kernel(forward, backward))
    theirs = attention.split_tree(*row, mask, Scoring(0.0, 0.3, None, None))
    torch.testing.assert_close(ours[:, :, :real], theirs[:, :, :real], rtol=1e-5, atol=1e-5)
    for mine, other in zip(
        torch.autograd.grad(ours, row, weights),
        torch.autograd.grad(theirs, row, weights),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("spans", "long"),
    [
        (((10, (LONG,)), (0, (LONG,))), True),
        (((LONG, (10, 10)),), False),
        (((0, (LONG,)), (0, (LONG // 2,))), False),
    ],
    ids=["long", "a shared prompt", "short on average"],
)
def test_rows_of_long_chains_are_long(spans: Any, long: bool) -> None:
    assert tree_of(spans).long is long


def test_a_row_under_a_window_is_not_long() -> None:
    tree = tree_of(((0, (LONG,)),))
    meta = torch.zeros(len(tree.owner), dtype=torch.int32, device="meta")
    tree.owner = tree.owner.to("meta")
    assert TreeMask(tree, None).long
    assert not TreeMask(tree, meta).long
