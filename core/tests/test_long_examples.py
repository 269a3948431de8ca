"""One product per long example, with torch's kernels for the CPU in the place of cuDNN's."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import llama, row
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.data.packing import blank_batch
from rlhf.model import attention, masks
from rlhf.model.kernels import layers
from rlhf.model.kernels import long_examples as long_examples_module
from rlhf.model.kernels.layers import compile_layers
from rlhf.model.kernels.long_examples import KERNELS, SIZES, Kernel, long_examples
from rlhf.model.kernels.tree import Heads, Scoring
from rlhf.model.masks import LONG, Tree, TreeMask
from rlhf.model.packed import PackedModel
from rlhf.model.parts import decoder, layers_of

LENGTHS = (SIZES + 70, SIZES, 300)


def forward(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Any:
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = attend(query, key, value, 0.0, True, scale=scale)
    return output, lse


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
    scale: float | None,
) -> Any:  # fmt: skip
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return attend(gradient, query, key, value, output, lse, 0.0, True, scale=scale)


def tree_of(spans: Any) -> Tree:
    total = sum(prompt + sum(answers) for prompt, answers in spans)
    return Tree(blank_batch(torch.zeros(-(-total // 128) * 128, dtype=torch.long), spans))


def test_each_example_has_the_values_and_gradients_of_a_product_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(KERNELS, "cpu", Kernel(forward, backward))
    mask = TreeMask(tree_of(tuple((0, (length,)) for length in LENGTHS)), None)
    torch.manual_seed(0)
    size, real = len(mask.tree.owner), sum(LENGTHS)
    assert size > real, "the row has tokens that round it up"
    row = [torch.randn(1, size, 2, 8).transpose(1, 2).requires_grad_() for _ in range(3)]
    weights = torch.randn(1, 2, size, 8)
    weights[:, :, real:] = 0
    ours = long_examples(*row, torch.tensor(LENGTHS), 0.3)
    theirs = attention.split_tree(*row, mask, Scoring(0.0, 0.3, None, None))
    torch.testing.assert_close(ours[:, :, :real], theirs[:, :, :real], rtol=1e-5, atol=1e-5)
    for mine, other in zip(
        torch.autograd.grad(ours, row, weights),
        torch.autograd.grad(theirs, row, weights),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.fixture
def nothing_known() -> Iterator[None]:
    """No kind of attention has run yet, and nothing is compiled."""
    known = (long_examples_module.KINDS, long_examples_module.AGREES)
    for each in known:
        each.clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    for each in known:
        each.clear()
    torch._dynamo.reset()


@pytest.mark.usefixtures("nothing_known")
def test_compiled_layers_take_each_long_example_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "cpu", Kernel(forward, backward))
    compiler = torch.compile(layers._run, backend="aot_eager")
    monkeypatch.setattr(layers, "_compiler", lambda: compiler)
    monkeypatch.setattr(masks, "LONG", 100)
    rows = [row(130, 90), row(300), row(200, 150, 140), row(90, 120, 310)]

    module = llama().train()
    with monkeypatch.context() as own:
        own.setattr(attention, "cudnn_agrees", lambda kind: True)
        own.setattr(attention, "split_tree", attention.kernel_tree)
        expected = gradients(module, rows)
    [kind] = long_examples_module.KINDS
    heads = module.causal.config.num_attention_heads
    assert kind == Heads(heads, 2, 8, 8, torch.float32, 8**-0.5, None)
    monkeypatch.setattr(long_examples_module, "_agrees", lambda kind: True)
    monkeypatch.setattr(attention, "split_tree", attention.kernel_tree)
    compile_layers(decoder(module.causal), None, longest=LONG)
    calls = []
    monkeypatch.setitem(
        KERNELS, "cpu", Kernel(lambda *given: calls.append(1) or forward(*given), backward)
    )
    found = gradients(module, rows)
    num_layers = len(layers_of(decoder(module.causal)))
    assert len(calls) == num_layers * 9, "each example of each row"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    # A row of one example has a form of its own, as any size of 1.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def gradients(module: PackedModel, batches: list[PackedBatch]) -> list[Tensor]:
    module.zero_grad()
    for batch in batches:
        hidden = module.packed_row(batch)
        (hidden * torch.linspace(-1, 1, hidden.shape[-1])).sum().backward()
    return [item.grad.clone() for item in module.parameters() if item.grad is not None]


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
