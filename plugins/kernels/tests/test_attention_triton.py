"""The kernel of tree attention against a dense softmax, run by an interpreter without a device."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from kernel_models import KINDS, batch_of, compiled_for_a_gpu, whole
from torch import Tensor

from rlhf.kernels import Scoring, Tree, TreeMask
from rlhf.model.masks import lowest_visible
from rlhf_kernels.tree import Heads as KernelHeads
from rlhf_kernels.tree import fused_tree, is_uneven

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPANS = (
    ((5, (3, 4)), (0, (6,)), (7, (2, 2, 9)), (0, (20, 30)), (12, ())),
    ((100, (40, 60)), (0, (30,))),
)


class Heads(NamedTuple):
    heads: int
    key_heads: int
    width: int
    of_value: int


CASES = {
    "one head": (Heads(1, 1, 16, 16), Scoring(0.0, None, None, None)),
    "groups": (Heads(4, 2, 24, 24), Scoring(0.0, 0.3, None, None)),
    "other values": (Heads(2, 2, 48, 8), Scoring(0.0, 0.2, None, None)),
    "capped": (Heads(2, 1, 8, 8), Scoring(0.0, 0.3, 2.0, None)),
    "sinks": (Heads(2, 1, 16, 16), Scoring(0.0, None, None, torch.tensor([0.5, -1.0]))),
    "wide": (Heads(2, 1, 128, 128), Scoring(0.0, None, None, None)),
    "wider": (Heads(2, 1, 160, 160), Scoring(0.0, None, None, None)),
    "widest": (Heads(2, 1, 256, 256), Scoring(0.0, None, None, None)),
}
DTYPES = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Precisions and the largest accepted error, as a share of the norm."""


def dense(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scoring: Scoring) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scale = query.shape[3] ** -0.5 if scoring.scale is None else scoring.scale
    scores = query @ key.transpose(2, 3) * scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if scoring.sinks is not None:
        sink = scoring.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), -1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value


def errors(
    case: str, spans: Any, kind: str, dtype: torch.dtype, *, split: bool = False
) -> list[float]:
    """The errors of the output and of each gradient; the same in each run."""
    heads, scoring = CASES[case]
    batch, function = batch_of(spans), KINDS[kind]
    lowest = None if function is None else lowest_visible(Tree(batch), function).to(DEVICE)
    mask = TreeMask(Tree(batch.to(torch.device(DEVICE))), lowest)
    size, generator = len(batch.tokens), torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator).to(DEVICE, dtype)

    # The numbers of a head are adjacent in memory, or the heads of a token.
    query = random(heads.heads, size, heads.width)
    key = random(size, heads.key_heads, heads.width).transpose(1, 2)
    value = random(size, heads.key_heads, heads.of_value).transpose(1, 2)
    weights = random(size, heads.heads, heads.of_value).transpose(1, 2)
    if scoring.sinks is not None:
        scoring = scoring._replace(sinks=scoring.sinks.to(DEVICE).requires_grad_())
    inputs = [item.requires_grad_() for item in (query, key, value)]
    exact = [item.detach().double().requires_grad_() for item in inputs]
    found = fused_tree(*inputs, mask, scoring, split=split)
    expected = dense(*exact, whole(mask).to(DEVICE), scoring)
    sinks = [] if scoring.sinks is None else [scoring.sinks]
    gradients, again = (
        torch.autograd.grad(found, [*inputs, *sinks], weights, retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    ours = (found, *gradients)
    theirs = (expected, *torch.autograd.grad(expected, [*exact, *sinks], weights.double()))
    return [
        float((a - b).detach().norm() / b.detach().norm())
        for a, b in zip(ours, theirs, strict=True)
    ]


@pytest.mark.parametrize(
    ("case", "spans", "kind"),
    [
        *(("groups", SPANS[0], kind) for kind in ("full", "sliding", "wide", "chunked")),
        # The interpreter takes longer for each head.
        *(("one head", SPANS[1], kind) for kind in ("full", "sliding")),
        *(pytest.param("groups", SPANS[1], kind, marks=pytest.mark.matrix) for kind in KINDS),
    ],
)
def test_values_and_gradients_under_the_mask_of_trees(case: str, spans: Any, kind: str) -> None:
    assert max(errors(case, spans, kind, torch.float32)) < DTYPES[torch.float32]


@pytest.mark.parametrize("case", ["one head", "groups", "sinks"])
def test_gradients_of_keys_summed_from_those_of_each_head(case: str) -> None:
    assert max(errors(case, SPANS[1], "full", torch.float32, split=True)) < DTYPES[torch.float32]


@pytest.mark.parametrize(
    ("spans", "key_heads", "uneven"),
    [
        (((64, (1024,) * 8),) * 2, 2, True),
        (((100, (1000,) * 16),), 2, True),
        (((64, (1024,) * 8),) * 2, 12, False),
        (((200, (100, 100)),) * 40, 2, False),
        (((0, (16_384,)),), 2, False),
        ((), 2, False),
    ],
    ids=["eight answers", "sixteen answers", "no groups", "pairs", "one document", "filler"],
)
def test_backward_is_split_where_many_answers_share_a_prompt(
    spans: Any, key_heads: int, uneven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    processors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    kind = KernelHeads(12, key_heads, 128, 128, torch.bfloat16, 1.0, None)
    assert is_uneven(spans, kind, torch.device("cuda")) == uneven


@pytest.mark.parametrize("case", [case for case in CASES if case != "groups"])
def test_values_and_gradients_of_heads_of_all_kinds(case: str) -> None:
    assert max(errors(case, SPANS[0], "wide", torch.float32)) < DTYPES[torch.float32]


@pytest.mark.skipif(DEVICE == "cpu", reason="tiles for other precisions need a device")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [("groups", torch.float32), ("groups", torch.float16), *((n, torch.bfloat16) for n in CASES)],
)
def test_values_and_gradients_of_longer_rows(case: str, dtype: torch.dtype) -> None:
    for spans in (((200, (90, 130)), (0, (40,)), (3, (300,))), ((1000, (24,)),)):
        for kind in ("full", "sliding", "wide", "chunked"):
            for split in (False, True):
                found = errors(case, spans, kind, dtype, split=split)
                assert max(found) < DTYPES[dtype], (spans, kind, split)


def test_tokens_that_only_round_a_row_up_see_only_themselves() -> None:
    assert errors("one head", (), "full", torch.float32)[0] < 1e-6


@pytest.mark.parametrize(
    ("capability", "memory", "width", "precision"),
    [
        (90, 232_448, 128, "bfloat16"),
        pytest.param(89, 101_376, 128, "bfloat16", marks=pytest.mark.matrix),
        pytest.param(90, 232_448, 160, "bfloat16", marks=pytest.mark.matrix),
        pytest.param(80, 166_912, 128, "bfloat16", marks=pytest.mark.matrix),
        pytest.param(75, 65_536, 128, "float16", marks=pytest.mark.matrix),
        pytest.param(89, 101_376, 256, "float32", marks=pytest.mark.matrix),
    ],
)
def test_the_kernels_compile_for_a_gpu_and_fit_its_shared_memory(
    capability: int, memory: int, width: int, precision: str, tmp_path: Path
) -> None:
    needed = compiled_for_a_gpu("attention", capability, memory, width, precision, cache=tmp_path)
    assert len(needed) == 3
    assert max(needed) <= memory
