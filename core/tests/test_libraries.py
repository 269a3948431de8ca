"""Attention of long examples by libraries, with products on the CPU in the place of theirs."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from families import llama, row
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.data.example import Answer, Example
from rlhf.data.packing import blank_batch, pack
from rlhf.model import attention, masks
from rlhf.model.kernels import flash, layers, libraries
from rlhf.model.kernels.cudnn import KERNELS, SIZES, Kernel, long_examples
from rlhf.model.kernels.flash import Pass, flash_row
from rlhf.model.kernels.layers import compile_layers
from rlhf.model.kernels.tree import Heads, Scoring
from rlhf.model.masks import LONG, LONG_SHARED, Tree, TreeMask
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


def scores(query: Tensor, key: Tensor, seen: Pass, scale: float) -> Tensor:
    """Scores [heads, Q, K] of one pass, -inf for what is not seen."""
    visible = torch.zeros(len(query), len(key), dtype=torch.bool)
    ends = zip(pairwise(seen.query_ends.tolist()), pairwise(seen.key_ends.tolist()), strict=True)
    for (start, stop), (first, last) in ends:
        assert stop - start <= seen.most_queries
        assert last - first <= seen.most_keys
        block = torch.ones(stop - start, last - first, dtype=torch.bool)
        visible[start:stop, first:last] = block.tril() if seen.causal else block
    products = torch.einsum("qhc,khc->hqk", query, repeated(key, query))
    return (products * scale).masked_fill(~visible, float("-inf"))


def repeated(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def flash_forward(query: Tensor, key: Tensor, value: Tensor, seen: Pass, scale: float) -> Any:
    found = scores(query, key, seen, scale)
    output = torch.einsum("hqk,khd->qhd", found.softmax(-1), repeated(value, query))
    return output.contiguous(), found.logsumexp(-1)


def flash_backward(given: Any, lse: Tensor, seen: Pass, scale: float) -> Any:
    gradient, query, key, value, output = given
    shares = (scores(query, key, seen, scale) - lse.unsqueeze(-1)).exp()
    by_share = torch.einsum("qhd,khd->hqk", gradient, repeated(value, query))
    by_score = shares * (by_share - (gradient * output).sum(-1).T.unsqueeze(-1)) * scale
    of_value = torch.einsum("hqk,qhd->khd", shares, gradient)
    of_key = torch.einsum("hqk,qhc->khc", by_score, query)
    of_value, of_key = (
        change.unflatten(1, (key.shape[1], -1)).sum(2).contiguous() for change in (of_value, of_key)
    )
    of_query = torch.einsum("hqk,khc->qhc", by_score, repeated(key, query)).contiguous()
    return of_query, of_key, of_value


def tree_of(spans: Any) -> Tree:
    total = sum(prompt + sum(answers) for prompt, answers in spans)
    return Tree(blank_batch(torch.zeros(-(-total // 128) * 128, dtype=torch.long), spans))


def tree(prompt: int, *answers: int) -> PackedBatch:
    """A prompt with several answers in a row of whole blocks."""
    tokens = [Answer([1 + k % 90 for k in range(length)]) for length in answers]
    return pack([Example([1 + k % 80 for k in range(prompt)], tokens)], [0], round_to=128)


def assert_equal_to_split_tree(
    attend: Callable[..., Tensor], mask: TreeMask, num_tokens: int, heads: int
) -> None:
    torch.manual_seed(0)
    size = len(mask.tree.owner)
    assert size > num_tokens, "the row has tokens that round it up"
    row = [torch.randn(1, size, own, 8).transpose(1, 2) for own in (heads, 2, 2)]
    leaves = [tensor.requires_grad_() for tensor in row]
    weights = torch.randn(1, heads, size, 8)
    weights[:, :, num_tokens:] = 0
    ours = attend(*leaves)
    theirs = attention.split_tree(*leaves, mask, Scoring(0.0, 0.3, None, None))
    torch.testing.assert_close(
        ours[:, :, :num_tokens], theirs[:, :, :num_tokens], rtol=1e-5, atol=1e-5
    )
    for mine, other in zip(
        torch.autograd.grad(ours, leaves, weights),
        torch.autograd.grad(theirs, leaves, weights),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_each_example_has_the_values_and_gradients_of_a_product_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(KERNELS, "cpu", Kernel(forward, backward))
    mask = TreeMask(tree_of(tuple((0, (length,)) for length in LENGTHS)), None)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return long_examples(query, key, value, torch.tensor(LENGTHS), 0.3)

    assert_equal_to_split_tree(attend, mask, sum(LENGTHS), heads=2)


@pytest.mark.parametrize(
    "spans",
    [
        ((0, (90,)), (20, (50,))),
        ((40, (30, 20)), (0, (60,)), (25, (9, 1, 14)), (30, (11,))),
        ((0, (40, 30)), (50, ())),
        ((70, (30, 21)),),
    ],
    ids=["chains", "trees and chains", "no prompt, no answer", "one tree"],
)
def test_two_passes_have_the_values_and_gradients_of_one_product(
    monkeypatch: pytest.MonkeyPatch, spans: Any
) -> None:
    monkeypatch.setattr(flash, "attend", flash_forward)
    monkeypatch.setattr(flash, "differentiate", flash_backward)
    mask = TreeMask(tree_of(spans), None)
    num_tokens = sum(mask.tree.lengths[:-1])
    parts = masks.layout(spans, len(mask.tree.owner), torch.device("cpu"))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flash_row(query, key, value, parts, 0.3)

    assert_equal_to_split_tree(attend, mask, num_tokens, heads=4)


@pytest.fixture
def nothing_known() -> Iterator[None]:
    """No kind of attention has run yet, and nothing is compiled."""
    known = (libraries.KINDS, libraries.AGREES)
    for each in known:
        each.clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    for each in known:
        each.clear()
    torch._dynamo.reset()


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_compiled_layers_use_a_library(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls: list[int] = []

    def counted(own: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: calls.append(1) or own(*given)

    monkeypatch.setitem(KERNELS, "cpu", Kernel(counted(forward), backward))
    monkeypatch.setattr(flash, "attend", counted(flash_forward))
    monkeypatch.setattr(flash, "differentiate", flash_backward)
    monkeypatch.setattr(masks, "has_flash", lambda: name == "flash")
    monkeypatch.setattr(masks, "LONG", {name: 100})
    monkeypatch.setattr(masks, "LONG_SHARED", 50)
    compiler = torch.compile(layers._run, backend="aot_eager")
    monkeypatch.setattr(layers, "_compiler", lambda: compiler)
    rows = [row(130, 90), row(300), row(200, 150, 140), row(90, 120, 310)]
    # FlashAttention computes trees too, in two passes.
    expected_calls = {"cudnn": 9, "flash": 4 + 4}[name]
    if name == "flash":
        rows.append(tree(60, 40, 30))
        rows.append(tree(130, 10, 70, 50))

    module = llama().train()
    expected = gradients(module, rows)
    assert not calls
    monkeypatch.setattr(libraries, "_agrees", lambda *_: True)
    monkeypatch.setattr(attention, "split_tree", attention.kernel_tree)
    num_layers, heads = len(layers_of(decoder(module.causal))), 4
    for how in ("plain", "compiled"):
        if how == "compiled":
            compile_layers(decoder(module.causal), None)
        calls.clear()
        for found, other in zip(gradients(module, rows), expected, strict=True):
            assert (found - other).norm() / other.norm() < 1e-5, how
        assert len(calls) == num_layers * expected_calls, how
    assert {Heads(heads, 2, 8, 8, torch.float32, 8**-0.5, None)} == libraries.KINDS
    # A row of one example has a form of its own, as any size of 1, and so have trees.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def gradients(module: PackedModel, batches: list[PackedBatch]) -> list[Tensor]:
    module.zero_grad()
    for batch in batches:
        hidden = module.packed_row(batch)
        (hidden * torch.linspace(-1, 1, hidden.shape[-1])).sum().backward()
    return [item.grad.clone() for item in module.parameters() if item.grad is not None]


FLASH, CUDNN = LONG["flash"], LONG["cudnn"]


@pytest.mark.parametrize(
    ("spans", "found"),
    [
        (((10, (CUDNN,)), (0, (CUDNN,))), ("flash", "cudnn")),
        (((0, (CUDNN,)), (0, (CUDNN // 2,))), ("flash",)),
        (((0, (FLASH,)), (0, (FLASH // 2,))), ()),
        (((LONG_SHARED, (10, 10)),), ("flash",)),
        (((LONG_SHARED, (10, 10)), (0, (LONG_SHARED // 2,))), ()),
        ((), ()),
    ],
    ids=["long", "shorter", "short on average", "a shared prompt", "short paths", "nothing"],
)
def test_libraries_compute_rows_of_long_examples(
    monkeypatch: pytest.MonkeyPatch, spans: Any, found: tuple[str, ...]
) -> None:
    monkeypatch.setattr(masks, "has_flash", lambda: True)
    assert tree_of(spans).libraries == found
    monkeypatch.setattr(masks, "has_flash", lambda: False)
    assert tree_of(spans).libraries == tuple(name for name in found if name != "flash")


def test_a_row_under_a_window_is_computed_by_our_kernel() -> None:
    tree = tree_of(((0, (CUDNN,)),))
    meta = torch.zeros(len(tree.owner), dtype=torch.int32, device="meta")
    tree.owner = tree.owner.to("meta")
    assert "cudnn" in TreeMask(tree, None).libraries
    assert not TreeMask(tree, meta).libraries


@pytest.mark.usefixtures("nothing_known")
def test_the_first_library_that_agrees_and_may_be_used_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreeing = {"flash", "cudnn"}
    monkeypatch.setattr(libraries, "_agrees", lambda name, kind, shared: name in agreeing)
    kind = Heads(4, 2, 64, 64, torch.bfloat16, 0.125, None)
    tree = tree_of(((0, (100,)),))
    tree.libraries = ("flash", "cudnn")
    mask, plain = TreeMask(tree, None), Scoring(0.0, None, None, None)
    assert libraries.choose(kind, mask, plain) == "flash"
    assert libraries.choose(kind, mask, plain._replace(softcap=30.0)) is None
    assert libraries.choose(kind, mask, plain._replace(sinks=torch.zeros(4))) is None
    agreeing.remove("flash")
    libraries.AGREES.clear()
    assert libraries.choose(kind, mask, plain) == "cudnn"
    torch.use_deterministic_algorithms(True)
    try:
        assert libraries.choose(kind, mask, plain) is None, "its gradients differ between runs"
        agreeing.add("flash")
        libraries.AGREES.clear()
        assert libraries.choose(kind, mask, plain) == "flash"
    finally:
        torch.use_deterministic_algorithms(False)
