"""RMS norms are found by what they compute, and their Triton kernels are held against the norms of
transformers and autograd; Triton's interpreter runs them where there is no accelerator."""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from rlhf.memory.estimate import LiveBytes
from rlhf_devkit.families import FAMILIES, SIZES
from rlhf_kernels import fused
from rlhf_kernels.norms import Formula, formula_of, fuse_norms

pytest.importorskip("triton")
from rlhf_kernels.norms_triton import RMSNorm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(1, 5, 96), (1, 9, 4, 32), (3, 5000)]
"""Rows narrower than a tile, heads, and rows wider than one."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", [LlamaRMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_their_gradients_are_those_of_transformers(
    shape: tuple[int, ...], family: type, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    norm = family(shape[-1], eps=1e-3).to(DEVICE, dtype)
    norm.weight.data += torch.randn(shape[-1], device=DEVICE).to(dtype)
    hidden = torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()
    gradient = torch.randn(shape, device=DEVICE).to(dtype)
    output = norm(hidden)
    expected = torch.autograd.grad(output, (hidden, norm.weight), gradient)
    offset = float(family is GemmaRMSNorm)
    found = RMSNorm.apply(hidden, norm.weight, 1e-3, offset, family is GemmaRMSNorm)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    torch.testing.assert_close(found, output, **close)
    changes = torch.autograd.grad(found, (hidden, norm.weight), gradient)
    for change, wanted in zip(changes, expected, strict=True):
        torch.testing.assert_close(change, wanted, **close)


def test_programs_share_the_rows_of_a_long_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_kernels import norms_triton

    monkeypatch.setattr(norms_triton, "PROGRAMS", 2)
    monkeypatch.setattr(norms_triton, "ELEMENTS", 64)
    torch.manual_seed(0)
    hidden = torch.randn(11, 32, device=DEVICE, requires_grad=True)
    weight = torch.randn(32, device=DEVICE, requires_grad=True)
    expected = torch.nn.functional.rms_norm(hidden, (32,), weight, 1e-6)
    found = RMSNorm.apply(hidden, weight, 1e-6, 0.0, False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(expected.square().sum(), (hidden, weight))
    changes = torch.autograd.grad(found.square().sum(), (hidden, weight))
    torch.testing.assert_close(changes, wanted, rtol=1e-4, atol=1e-4)


class Gated(LlamaRMSNorm):
    """As hybrid families have them; they may give a gate."""

    def forward(self, hidden: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(hidden if gate is None else hidden * gate)


class Outside(LlamaRMSNorm):
    """With its epsilon outside of the root."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        root = hidden.float().square().mean(-1, keepdim=True).sqrt()
        return self.weight * (hidden.float() / (root + self.variance_epsilon)).to(hidden.dtype)


@pytest.mark.parametrize(
    ("module", "formula"),
    [
        (LlamaRMSNorm(48, eps=1e-5), Formula(1e-5, 0.0, False)),
        (GemmaRMSNorm(48, eps=1e-6), Formula(1e-6, 1.0, True)),
        (Olmo2RMSNorm(48, eps=1e-6), Formula(1e-6, 0.0, True)),
        (torch.nn.RMSNorm(48, eps=1e-3), Formula(1e-3, 0.0, True)),
        (torch.nn.RMSNorm(48), None),
        (torch.nn.RMSNorm((4, 48), eps=1e-6), None),
        (torch.nn.LayerNorm(48, bias=False), None),
        (torch.nn.Linear(48, 48, bias=False), None),
        (Gated(48), None),
        (Outside(48), None),
    ],
)
def test_a_norm_is_recognised_by_what_it_computes(
    module: torch.nn.Module, formula: Formula | None
) -> None:
    with torch.random.fork_rng():
        before = torch.random.get_rng_state()
        assert formula_of(module) == formula
        assert formula_of(module.to("meta")) == formula
        assert torch.equal(torch.random.get_rng_state(), before)


def test_a_norm_on_the_meta_device_keeps_its_input_and_a_number_for_each_row() -> None:
    norm = LlamaRMSNorm(64).to("meta")
    assert fuse_norms(torch.nn.ModuleList([norm, torch.nn.Linear(2, 2)])) == 1
    hidden = torch.empty(5, 64, device="meta", requires_grad=True)
    with LiveBytes(known=[norm.weight, hidden]) as counter:
        output = norm(hidden)
        assert counter.live == 4 * (5 * 64 + 5)
    output.sum().backward()


class Counted(torch.nn.Module):
    """A norm that adds `offset` to its weight, and counts the rows that it is sent."""

    rows = 0

    def __init__(self, size: int, offset: Any = 0.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps, self.offset = eps, offset

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        Counted.rows += len(hidden)
        return Formula(self.eps, float(self.offset), True)(hidden, self.weight)


def test_norms_that_compute_alike_are_sent_one_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "rows", 0)
    each = [Counted(8), Counted(8, 1.0), Counted(8), Counted(8, eps=1e-5), Counted(16), Counted(8)]
    assert fuse_norms(torch.nn.ModuleList(each)) == 6
    assert [norm.formula for norm in each] == [
        Formula(norm.eps, norm.offset, True) for norm in each
    ]
    assert Counted.rows == 4 * 3
    # One of two has a bias.
    for place in (0, 1):
        pair = [Counted(8), Counted(8)]
        pair[place].bias = torch.nn.Parameter(torch.ones(8))
        assert fuse_norms(torch.nn.ModuleList(pair)) == 1
        assert not hasattr(pair[place], "formula")
    # What a tensor holds is not compared.
    with_tensors = [Counted(8, torch.tensor(value)) for value in (0.0, 1.0)]
    assert fuse_norms(torch.nn.ModuleList(with_tensors)) == 2
    assert [norm.formula for norm in with_tensors] == [
        Formula(1e-6, 0.0, True), Formula(1e-6, 1.0, True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "said"),
    [
        (
            "Qwen2",
            "layers     norms, rotary embedding and gates fused, by Liger 0.8.5 and our own "
            "kernels",
        ),
        ("GPT-OSS", "layers     norms and rotary embedding fused"),
        ("Mixtral", "layers     norms, rotary embedding and experts fused"),
        ("GPT-2", ""),
    ],
)
def test_what_is_fused_is_reported(family: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "fused_on", lambda kind: True)
    monkeypatch.setattr(fused, "version", lambda package: "0.8.5")
    config_class, options = FAMILIES[family]
    config: Any = getattr(transformers, config_class)(**(SIZES | options))
    with torch.device("meta"):
        decoder = transformers.AutoModel.from_config(config)
    assert fused.fuse(decoder, "none", torch.device("meta")) == ""
    assert fused.fuse(decoder, "auto", torch.device("meta")) == said
