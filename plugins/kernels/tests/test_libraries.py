"""Attention of long examples by libraries, with products on the CPU in the place of theirs."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.data.example import Answer, Example
from rlhf.data.packing import blank_batch, pack
from rlhf.engine import rehearsing_on
from rlhf.kernels import BLOCK, Scoring, Tree, TreeMask
from rlhf.model import attention
from rlhf.model.accelerated import rehearsed_attention
from rlhf.model.packed import PackedModel
from rlhf.model.parts import decoder, layers_of
from rlhf.model.trainable import recompute
from rlhf_devkit.families import llama, row
from rlhf_kernels import ahead, flash, layers, libraries, rows
from rlhf_kernels import attention as attentions
from rlhf_kernels.cudnn import KERNELS, SIZES, Kernel, long_examples
from rlhf_kernels.flash import flash_row
from rlhf_kernels.kernels import TritonKernels
from rlhf_kernels.layers import compile_layers
from rlhf_kernels.libraries import Libraries
from rlhf_kernels.rows import LONG, LONG_SHARED, Row
from rlhf_kernels.tree import Heads

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


def scores(
    query: Tensor, key: Tensor, softmax_scale: float, causal: bool, **lengths: Any
) -> Tensor:
    """Scores [heads, Q, K] of one pass, -inf for what is not seen."""
    visible = torch.zeros(len(query), len(key), dtype=torch.bool)
    query_ends = lengths.get("cu_seqlens_q", torch.tensor([0, len(query)]))
    key_ends = lengths.get("cu_seqlens_k", torch.tensor([0, len(key)]))
    ends = zip(pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True)
    for (start, stop), (first, last) in ends:
        assert stop - start <= lengths.get("max_seqlen_q", stop)
        assert last - first <= lengths.get("max_seqlen_k", last)
        block = torch.ones(stop - start, last - first, dtype=torch.bool)
        visible[start:stop, first:last] = block.tril() if causal else block
    products = torch.einsum("qhc,khc->hqk", query, repeated(key, query))
    return (products * softmax_scale).masked_fill(~visible, float("-inf"))


def repeated(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool, **options: Any
) -> Any:
    """FlashAttention's forward, with tensors [T, heads, D] and lengths, or [1, T, heads, D]."""
    assert return_lse
    if query.dim() == 4:
        tensors = (tensor.squeeze(0) for tensor in (query, key, value))
        output, lse, _ = flash_forward(*tensors, return_lse=True, **options)
        return output.unsqueeze(0), lse.unsqueeze(0), None
    found = scores(query, key, **options)
    output = torch.einsum("hqk,khd->qhd", found.softmax(-1), repeated(value, query))
    return output.contiguous(), found.logsumexp(-1), None


def flash_backward(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, gradient: Tensor, lse: Tensor,
    *, deterministic: bool, **options: Any,
) -> Any:  # fmt: skip
    if query.dim() == 4:
        tensors = (tensor.squeeze(0) for tensor in (query, key, value, output, gradient, lse))
        found = flash_backward(*tensors, deterministic=deterministic, **options)
        return [tensor.unsqueeze(0) for tensor in found]
    shares = (scores(query, key, **options) - lse.unsqueeze(-1)).exp()
    by_share = torch.einsum("qhd,khd->hqk", gradient, repeated(value, query))
    by_score = shares * (by_share - (gradient * output).sum(-1).T.unsqueeze(-1))
    by_score = by_score * options["softmax_scale"]
    of_value = torch.einsum("hqk,qhd->khd", shares, gradient)
    of_key = torch.einsum("hqk,qhc->khc", by_score, query)
    of_value, of_key = (
        change.unflatten(1, (key.shape[1], -1)).sum(2).contiguous() for change in (of_value, of_key)
    )
    of_query = torch.einsum("hqk,khc->qhc", by_score, repeated(key, query)).contiguous()
    return of_query, of_key, of_value


def use_flash(monkeypatch: pytest.MonkeyPatch, forward: Callable[..., Any]) -> None:
    library = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=flash_backward)
    monkeypatch.setattr(flash, "_library", lambda: library)


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
        ((70, (90,)),),
    ],
    ids=["chains", "trees and chains", "no prompt, no answer", "one tree", "one chain"],
)
def test_two_passes_have_the_values_and_gradients_of_one_product(
    monkeypatch: pytest.MonkeyPatch, spans: Any
) -> None:
    lengths: list[bool] = []

    def forward(*given: Tensor, **options: Any) -> Any:
        lengths.append("cu_seqlens_q" in options)
        return flash_forward(*given, **options)

    use_flash(monkeypatch, forward)
    mask = TreeMask(tree_of(spans), None)
    num_tokens = sum(mask.tree.lengths[:-1])
    parts = rows.layout(spans, len(mask.tree.owner), torch.device("cpu"))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flash_row(query, key, value, parts, 0.3)

    assert_equal_to_split_tree(attend, mask, num_tokens, heads=4)
    passes = 1 + any(prompt and len(answers) > 1 for prompt, answers in spans)
    assert lengths == [Row(mask.tree).form != "one"] * passes


def dense(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, scoring: Scoring) -> Tensor:
    """In the place of our kernel."""
    place = torch.arange(query.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(
        query, attention.repeat_heads(key, query), attention.repeat_heads(value, query),
        attn_mask=mask.visible(place[:, None], place[None, :]), scale=scoring.scale,
    )  # fmt: skip


@pytest.fixture
def chooser(monkeypatch: pytest.MonkeyPatch) -> Libraries:
    """Rows on the CPU are computed as on CUDA. Returns what chooses their libraries; no kind of
    attention has run yet."""
    kernels = TritonKernels()
    monkeypatch.setattr(attention, "kernels_on", lambda device: kernels)
    return kernels.attention.libraries


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, chooser: Libraries) -> Iterator[list[str]]:
    """Products are in the place of all kernels, and nothing is compiled. Returns the names of what
    has computed."""
    calls: list[str] = []

    def counted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **options: calls.append(name) or kernel(*given, **options)

    def attend(*given: Any, split: bool = False, **named: Any) -> Tensor:
        return dense(*given, **named)

    ours = counted("ours", attend)
    monkeypatch.setattr(attentions, "fused_tree", ours)
    monkeypatch.setattr(libraries, "fused_tree", ours)
    monkeypatch.setitem(KERNELS, "cpu", Kernel(counted("cudnn", forward), backward))
    use_flash(monkeypatch, counted("flash", flash_forward))
    monkeypatch.setattr(rows, "has_flash", lambda: True)
    monkeypatch.setattr(rows, "LONG", {"flash": 100, "cudnn": 150})
    monkeypatch.setattr(rows, "LONG_SHARED", 50)
    layers._compiler.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield calls
    layers._compiler.cache_clear()
    torch._dynamo.reset()


CHAINS = [row(300), row(200, 150, 140), row(90, 120, 310)]
TREES = [tree(60, 40, 30), tree(130, 10, 70, 50)]


@pytest.mark.parametrize(
    ("name", "batches"), [("cudnn", CHAINS), ("flash", [row(130, 90), *CHAINS, *TREES])]
)
def test_compiled_layers_use_a_library(
    monkeypatch: pytest.MonkeyPatch,
    on_cpu: list[str],
    chooser: Libraries,
    name: str,
    batches: list[PackedBatch],
) -> None:
    monkeypatch.setattr(layers, "_inductor", "aot_eager")
    if name == "cudnn":
        monkeypatch.setattr(rows, "has_flash", lambda: False)
    module = llama().train()
    num_layers = len(layers_of(decoder(module.causal)))
    gradients(module, [batches[0]])
    [kind] = chooser.kinds
    assert kind == Heads(4, 2, 8, 8, torch.float32, 8**-0.5, None)
    chooser.kinds.clear()
    # No library is chosen for a kind of attention that has not run.
    expected = [gradients(module, [each]) for each in batches if not chooser.kinds.clear()]
    assert set(on_cpu) == {"ours"}

    for how in ("plain", "compiled"):
        chooser.kinds.add(kind)
        chooser._agrees.clear()
        if how == "compiled":
            compile_layers(decoder(module.causal), None)
        for each, known in zip(batches, expected, strict=True):
            chooser.choose(Row(Tree(each)))
            on_cpu.clear()
            for mine, other in zip(gradients(module, [each]), known, strict=True):
                assert (mine - other).norm() / other.norm() < 1e-5, how
            calls = len(each.spans) if name == "cudnn" else 1 + (Row(Tree(each)).form == "shared")
            assert on_cpu == [name] * calls * num_layers, how
    # A row of one example has a form of its own in the one case, since a size of 1 has, and rows
    # with trees in the other.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_a_recomputed_layer_uses_a_library(on_cpu: list[str], chooser: Libraries) -> None:
    module = llama().train()
    gradients(module, [row(40)])
    [kind] = chooser.kinds
    chooser.kinds.clear()
    batches = [CHAINS[1], TREES[0]]
    expected = [gradients(module, [each]) for each in batches if not chooser.kinds.clear()]
    chooser.kinds.add(kind)
    recompute(module.causal)
    for each, known in zip(batches, expected, strict=True):
        on_cpu.clear()
        for mine, other in zip(gradients(module, [each]), known, strict=True):
            assert (mine - other).norm() / other.norm() < 1e-5
        assert "flash" in on_cpu


def gradients(module: PackedModel, batches: list[PackedBatch]) -> list[Tensor]:
    module.zero_grad()
    for batch in batches:
        hidden = module.packed_row(batch)[batch.example >= 0]
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
    monkeypatch.setattr(rows, "has_flash", lambda: True)
    assert Row(tree_of(spans)).libraries == found
    monkeypatch.setattr(rows, "has_flash", lambda: False)
    assert Row(tree_of(spans)).libraries == tuple(name for name in found if name != "flash")


@pytest.mark.parametrize(
    ("found", "used"), [(rows.FLASH, True), ("4.0.0b35", False), ("5.1", True)]
)
def test_an_older_flash_attention_is_not_used(
    monkeypatch: pytest.MonkeyPatch, found: str, used: bool
) -> None:
    def version(name: str) -> str:
        assert name == "flash-attn-4"
        return found

    monkeypatch.setattr(rows, "version", version)
    assert rows.has_flash.__wrapped__() == used


@pytest.mark.parametrize("form", libraries.PROBED)
def test_libraries_are_compared_on_whole_blocks_of_each_form(form: rows.Form) -> None:
    spans = libraries.PROBED[form]
    assert sum(prompt + sum(answers) for prompt, answers in spans) % BLOCK == 0
    assert Row(tree_of(spans)).form == form


KIND = Heads(4, 2, 8, 8, torch.float32, 0.3, None)


def test_the_first_library_that_agrees_and_may_be_used_is_chosen(
    monkeypatch: pytest.MonkeyPatch, on_cpu: list[str], chooser: Libraries
) -> None:
    packed = Row(Tree(row(300)))
    assert chooser.choose(packed) == {}, "no kind of attention has run"
    chooser.kinds.add(KIND)
    assert chooser.choose(packed) == {KIND: "flash"}
    assert "cudnn" not in on_cpu, "the first one agreed"
    torch.use_deterministic_algorithms(True)
    try:
        assert chooser.choose(packed) == {KIND: "flash"}
        chooser._agrees.clear()

        def wrong(*given: Tensor, **options: Any) -> Any:
            output, *others = flash_forward(*given, **options)
            return 2 * output, *others

        use_flash(monkeypatch, wrong)
        with pytest.warns(match="FlashAttention 4 is not used, since it differs from our kernel"):
            assert chooser.choose(packed) == {}, "gradients of cuDNN's differ between runs"
    finally:
        torch.use_deterministic_algorithms(False)
    assert chooser.choose(packed) == {KIND: "cudnn"}
    packed.device = torch.device("meta")
    assert chooser.choose(packed) == {}, "nothing runs in a rehearsal"


@pytest.mark.parametrize("each", [[(300,), (150, 150)], [(150, 150), (300,)]])
def test_rows_of_one_example_and_of_several_are_compared_separately(
    on_cpu: list[str],
    chooser: Libraries,
    monkeypatch: pytest.MonkeyPatch,
    each: list[tuple[int, ...]],
) -> None:
    def wrong_for_one(*given: Tensor, **options: Any) -> Any:
        output, *others = flash_forward(*given, **options)
        return output if "cu_seqlens_q" in options else 2 * output, *others

    use_flash(monkeypatch, wrong_for_one)
    chooser.kinds.add(KIND)
    with pytest.warns(match="differs from our kernel"):
        chosen = {len(lengths): chooser.choose(Row(Tree(row(*lengths)))) for lengths in each}
    assert chosen == {1: {KIND: "cudnn"}, 2: {KIND: "flash"}}


def test_a_library_that_fails_is_not_used(
    monkeypatch: pytest.MonkeyPatch, on_cpu: list[str], chooser: Libraries
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("no kernel for this device\nat line 7")

    chooser.kinds.add(KIND)
    use_flash(monkeypatch, fail)
    monkeypatch.setitem(KERNELS, "cpu", Kernel(fail, fail))
    with pytest.warns() as seen:
        assert chooser.choose(Row(Tree(row(300)))) == {}
    assert [str(each.message) for each in seen] == [
        "FlashAttention 4 is not used, since it does not run here: no kernel for this device"
    ]

    def exhaust(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    chooser._agrees.clear()
    use_flash(monkeypatch, exhaust)
    with pytest.raises(torch.OutOfMemoryError):
        chooser.choose(Row(Tree(row(300))))


def test_layers_with_windows_soft_caps_or_sinks_keep_our_kernel(
    on_cpu: list[str], chooser: Libraries
) -> None:
    tree = Tree(row(300))
    query, key = (torch.randn(1, heads, 384, 8) for heads in (4, 2))
    plain = Scoring(0.0, 0.3, None, None)
    kernels: Any = attention.kernels_on(torch.device("cpu"))

    def kernel_of(lowest: Tensor | None, scoring: Scoring) -> str:
        mask = TreeMask(tree, lowest, kernels.row(tree, windowed=lowest is not None))
        attention.row_attention(query, key, key, mask, scoring)
        return on_cpu[-1]

    assert kernel_of(torch.zeros(384, dtype=torch.int32), plain) == "ours"
    assert not chooser.kinds, "no library could compute it"
    chooser.kinds.add(KIND)
    assert kernel_of(None, plain) == "flash"
    assert kernel_of(None, plain._replace(softcap=30.0)) == "ours"
    assert kernel_of(None, plain._replace(sinks=torch.zeros(4))) == "ours"
    assert kernel_of(None, plain._replace(dropout=0.1)) == "ours"


def test_a_rehearsal_notes_for_what_kernels_of_attention_are_compiled() -> None:
    with rehearsed_attention() as kinds, rehearsing_on("cuda"):
        llama().to("meta").packed_row(row(60, 40).to(torch.device("meta")))
    assert set(kinds) == {Heads(4, 2, 8, 8, torch.float32, 8**-0.5, None)}


def test_the_first_forward_and_the_first_backward_wait_for_their_kernels(
    on_cpu: list[str], chooser: Libraries, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels: Any = attention.kernels_on(torch.device("cpu"))
    done: list[str] = []
    monkeypatch.setattr(ahead, "_compile", lambda name, kinds, device: done.append(name))
    monkeypatch.setattr(ahead, "Thread", Later)
    kernels.compile_ahead((), torch.device("cpu"))
    hidden = llama().train().packed_row(row(60, 40))
    assert done == ["forward"]
    hidden.sum().backward()
    assert done == ["forward", "backward"]


class Later:
    """A thread that runs when it is waited for."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.join = partial(target, *args)

    def start(self) -> None:
        pass


@pytest.mark.parametrize("spans", [((0, (90,)),), ((40, (30, 20)), (5, (6,)))])
def test_operators_are_as_torch_expects_them(on_cpu: list[str], spans: Any) -> None:
    """Their results have the shapes, dtypes and strides that the compiler is told."""
    query, key = (torch.randn(1, 128, heads, 8).transpose(1, 2) for heads in (4, 2))
    value = torch.randn(1, 2, 128, 4)
    query.requires_grad_()
    parts = rows.layout(spans, 128, torch.device("cpu"))
    torch.library.opcheck(flash._attend, (query, key, value, parts, 0.3))
    query = query.detach()
    output, lse = flash._attend(query, key, value, parts, 0.3)
    given = (torch.randn_like(output), query, key, value, output, lse, parts, 0.3)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(flash._differentiate, given, test_utils=tests)
