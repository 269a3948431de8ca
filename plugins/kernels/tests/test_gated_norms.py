"""RMS norms with a gate: every one of transformers is recognised, and the Triton kernels, which the
interpreter runs where there is no accelerator, give what its own code and autograd give."""

import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kernel_models import compiled_for_a_gpu
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import hardsigmoid, relu, silu
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from rlhf.engine import replaced_forward
from rlhf.memory.estimate import LiveBytes
from rlhf.model.packed import PackedModel
from rlhf.plugin import ModelConfig
from rlhf.readouts import token_logprobs
from rlhf_devkit.families import DELTA, FAMILIES, LATENT, MAMBA, gradients, tree_batch
from rlhf_kernels.fp8 import rehearse_fp8
from rlhf_kernels.gated_norms import GatedFormula, rows_of
from rlhf_kernels.layers import rehearse_layers
from rlhf_kernels.norms import formula_of, fuse_norms

pytest.importorskip("triton")
from rlhf_kernels import gated_norms_triton
from rlhf_kernels.gated_norms_triton import GatedRMSNorm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH = 96
ERRORS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1.5e-2}
"""Largest relative errors. The interpreter rounds towards zero in bf16, but not in float16."""
HYBRIDS = [
    name
    for name, (_, options) in FAMILIES.items()
    if name == "Mamba 2" or any(options.items() >= kind.items() for kind in (MAMBA, DELTA, LATENT))
]


@cache
def norms_of_transformers() -> list[tuple[str, type, dict[str, Any]]]:
    """The classes of norms that take a gate, with each way to construct them."""
    found: list[tuple[str, type, dict[str, Any]]] = []
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        for name in re.findall(r"^class (\w*Norm\w*Gated)\(", file.read_text("utf-8"), re.M):
            package = f"transformers.models.{file.parent.name}.{file.stem}"
            kind = getattr(importlib.import_module(package), name)
            options = inspect.signature(kind).parameters
            ways: list[dict[str, Any]] = [{}]
            if "group_size" in options:
                ways = [{"group_size": WIDTH}, {"group_size": WIDTH // 4}]
            elif "n_groups" in options:
                ways = [
                    {"n_groups": number, "norm_before_gate": after}
                    for number in (1, 3)
                    for after in (True, False)
                ]
            found += [(f"{name} {way}", kind, way) for way in ways]
    return found


def norms(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Any]]:
    for name, kind, way in norms_of_transformers():
        torch.manual_seed(0)
        norm = kind(WIDTH, eps=1e-3, **way)
        norm.weight.data += 0.5 * torch.randn(WIDTH)
        yield name, norm.to(device, dtype)


def inputs(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a gate and a gradient."""
    hidden, gate, gradient = torch.randn(3, *shape, device=DEVICE).to(dtype)
    return hidden.requires_grad_(), (2 * gate).requires_grad_(), gradient


def run(norm: Any, hidden: Tensor, gate: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    output = norm(hidden, gate)
    wanted = (hidden, gate, norm.weight)
    changes = torch.autograd.grad(output, wanted, gradient)
    names = ("hidden", "gate", "weight")
    return {"output": output.detach(), **dict(zip(names, changes, strict=True))}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], name: str) -> None:
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert found[key].shape == value.shape
        error = float((found[key].float() - value.float()).norm() / value.float().norm())
        assert error < ERRORS[value.dtype], (name, key, error)


def test_every_gated_norm_of_transformers_is_recognised() -> None:
    formulas = {formula_of(norm) for _, norm in norms(torch.bfloat16, DEVICE)}
    assert formulas == {
        GatedFormula(1e-3, 1, False, False, False),
        GatedFormula(1e-3, 1, False, False, True),
        GatedFormula(1e-3, 3, False, False, True),
        GatedFormula(1e-3, 1, False, True, True),
        GatedFormula(1e-3, 3, False, True, True),
        GatedFormula(1e-3, 1, False, True, False),
        GatedFormula(1e-3, 4, False, True, False),
        GatedFormula(1e-3, 1, True, False, True),
    }
    assert {formula_of(norm) for _, norm in norms(torch.float32, torch.device("meta"))} == formulas


@pytest.mark.parametrize("dtype", ERRORS)
def test_values_and_gradients_are_those_of_transformers(dtype: torch.dtype) -> None:
    for name, norm in norms(dtype, DEVICE):
        tensors = inputs(dtype, 1, 7, WIDTH)
        expected = run(norm, *tensors)
        assert fuse_norms(norm) == 1
        found = run(norm, *tensors)
        assert_same(found, expected, name)
        if dtype == torch.float16:
            # The same roundings; sums in another order move few numbers.
            assert (found["output"] == expected["output"]).float().mean() > 0.98, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_and_transposed_tensors_are_read_where_they_are(dtype: torch.dtype) -> None:
    for name, norm in norms(dtype, DEVICE):
        hidden, wide, gradient = inputs(dtype, 1, 7, 3 * WIDTH)
        split = wide[..., 5 : 5 + WIDTH]
        turned = hidden[..., :WIDTH].mT.contiguous().mT
        assert not split.is_contiguous()
        assert turned.stride(-1) != 1
        tensors = (turned, split, gradient[..., 2 * WIDTH :])
        expected = run(norm, *tensors)
        fuse_norms(norm)
        assert_same(run(norm, *tensors), expected, name)
        changes = torch.autograd.grad(norm(turned, split).sum(), (hidden, wide))
        assert all(change.shape == wide.shape for change in changes)


def test_a_slice_is_not_copied_unless_torch_compiles() -> None:
    torch._dynamo.reset()
    wide = torch.randn(2, 6, 20)
    rows = rows_of(wide[:1, :, 4:12])
    assert rows.shape == (6, 8)
    assert rows.data_ptr() == wide[0, 0, 4:].data_ptr()
    compiled = torch.compile(rows_of, backend="eager", fullgraph=True)(wide[:1, :, 4:12])
    torch._dynamo.reset()
    assert torch.equal(compiled, rows)
    assert compiled.is_contiguous()


def test_programs_share_the_rows_of_a_long_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_norms_triton, "PROGRAMS", 4)
    monkeypatch.setattr("rlhf_kernels.norms_triton.ELEMENTS", 64)
    norm = Zamba2RMSNormGated(WIDTH, WIDTH // 3).to(DEVICE)
    tensors = inputs(torch.float32, 1, 11, WIDTH)
    expected = run(norm, *tensors)
    fuse_norms(norm)
    assert_same(run(norm, *tensors), expected, "one program for each group")


@pytest.mark.parametrize(("width", "group"), [(5000, 5000), (10_000, 2500)])
def test_rows_and_groups_wider_than_a_tile(width: int, group: int) -> None:
    norm = Zamba2RMSNormGated(width, group).to(DEVICE)
    tensors = inputs(torch.float32, 3, width)
    expected = run(norm, *tensors)
    fuse_norms(norm)
    assert_same(run(norm, *tensors), expected, "wide")


def test_hidden_states_in_float32_stay_so_beside_a_gate_in_bf16() -> None:
    """As the scan of Mamba 2 returns them."""
    norm = Zamba2RMSNormGated(WIDTH, WIDTH).to(DEVICE, torch.bfloat16)
    hidden, gate, gradient = inputs(torch.float32, 1, 7, WIDTH)
    tensors = (hidden, gate.detach().bfloat16().requires_grad_(), gradient)
    expected = run(norm, *tensors)
    fuse_norms(norm)
    found = run(norm, *tensors)
    assert found["output"].dtype == torch.float32
    assert_same(found, expected, "mixed")


class Other(Qwen3_5RMSNormGated):
    """One that multiplies the normed rows by something else."""

    def __init__(self, factor: Any, *, rounded: bool = False) -> None:
        super().__init__(WIDTH)
        self.factor, self.rounded = factor, rounded

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        x = nn.functional.rms_norm(hidden.float(), (WIDTH,), eps=self.variance_epsilon)
        factor = self.factor(gate if self.rounded else gate.float())
        return (self.weight * x.to(hidden.dtype) * factor).to(hidden.dtype)


class Named(Qwen3_5RMSNormGated):
    """A second argument of another name may be anything."""

    def forward(self, hidden: Tensor, scale: Tensor) -> Tensor:
        return super().forward(hidden, scale)


def test_a_module_that_computes_something_else_is_left_alone() -> None:
    assert formula_of(Other(silu)) == GatedFormula(1e-6, 1, False, False, False)
    others = [
        Other(relu), Other(hardsigmoid), Other(lambda gate: silu(gate).clamp(max=20.0)),
        Other(torch.tanh), Other(silu, rounded=True), Named(WIDTH),
    ]  # fmt: skip
    for module in others:
        assert formula_of(module) is None
        assert fuse_norms(module) == 0
        assert replaced_forward(module) is None


def test_without_a_gate_of_the_same_shape_the_modules_code_runs() -> None:
    norm = Zamba2RMSNormGated(WIDTH, WIDTH).to(DEVICE)
    hidden, gate, _ = inputs(torch.float32, 1, 7, WIDTH)
    expected = norm(hidden), norm(hidden, gate[:, :, :1])
    assert fuse_norms(norm) == 1
    assert torch.equal(norm(hidden), expected[0])
    assert torch.equal(norm(hidden, gate[:, :, :1]), expected[1])
    assert "GatedRMSNorm" in str(norm(hidden, gate=gate).grad_fn.next_functions)


def kept(norm: Any, device: torch.device, dtype: torch.dtype) -> list[Any]:
    """What a norm keeps for backward of a slice and of a transposed tensor."""
    each: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().nbytes()
        each.append((tensor.shape, tensor.dtype, tensor.stride(), storage))
        return tensor

    wide = torch.zeros(1, 7, 3 * WIDTH, dtype=dtype, device=device, requires_grad=True)
    turned = torch.zeros(1, WIDTH, 7, dtype=dtype, device=device, requires_grad=True).mT
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = norm(turned, wide[..., WIDTH : 2 * WIDTH])
    output.sum().backward()
    return each


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stand_in_on_the_meta_device_keeps_what_the_kernel_keeps(dtype: torch.dtype) -> None:
    meta = torch.device("meta")
    for (name, real), (_, stand_in) in zip(norms(dtype, DEVICE), norms(dtype, meta), strict=True):
        assert fuse_norms(real) == fuse_norms(stand_in) == 1
        found = kept(real, DEVICE, dtype)
        assert len(found) == 4, name
        assert kept(stand_in, meta, dtype) == found, name


def test_beside_its_inputs_a_norm_keeps_a_number_for_each_row_and_group() -> None:
    norm = Zamba2RMSNormGated(WIDTH, WIDTH // 2).to("meta")
    assert fuse_norms(norm) == 1
    hidden, gate = torch.empty(2, 5, WIDTH, device="meta", requires_grad=True)
    with LiveBytes(known=[norm.weight, hidden, gate]) as counter:
        output = norm(hidden, gate)
        assert counter.live == 4 * (5 * WIDTH + 5 * 2)
    output.sum().backward()


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_family_has_no_gated_norm_that_is_not_fused(name: str) -> None:
    config, options = FAMILIES[name]
    with torch.device("meta"):
        decoder = transformers.AutoModel.from_config(getattr(transformers, config)(**options))
    gated = [module for module in decoder.modules() if type(module).__name__.endswith("NormGated")]
    rehearse_layers(decoder, ModelConfig(kernels="compile"))
    for module in gated:
        assert isinstance(module.formula, GatedFormula)
    hybrid = name not in ("DeepSeek V3", "GLM 5", "MiniCPM 3", "Granite 4, dense", "Falcon-H1")
    assert bool(gated) == hybrid


@pytest.mark.parametrize("name", ["Qwen3.5", "Bamba", "Kimi Linear"])
def test_fused_norms_give_a_hybrid_its_gradients(name: str) -> None:
    config, options = FAMILIES[name]
    torch.manual_seed(0)
    kind = getattr(transformers, config)(**options)
    causal: Any = transformers.AutoModelForCausalLM.from_config(kind)
    for parameter in causal.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    module = PackedModel(causal.to(DEVICE))
    batch = tree_batch().to(DEVICE)
    module(batch, token_logprobs)["logprobs"].sum().backward()
    expected = gradients(causal)
    fuse_norms(causal)
    module(batch, token_logprobs)["logprobs"].sum().backward()
    found = gradients(causal)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        near = 1e-3 * float(value.abs().max()) + 1e-6
        torch.testing.assert_close(found[key], value, rtol=0, atol=near, msg=key)


class Projected(nn.Module):
    """A product of heads that were normed, as at the end of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.product = KimiLinearRMSNormGated(16), nn.Linear(64, 32, bias=False)

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        output: Tensor = self.product(self.norm(hidden, gate).reshape(-1, 64))
        return output


def test_a_product_in_fp8_keeps_one_byte_of_each_number_of_a_gated_norm() -> None:
    layer = Projected().to("meta")
    fuse_norms(layer)
    rehearse_fp8(nn.ModuleList([layer]))
    hidden, gate = torch.empty(2, 5, 4, 16, device="meta", requires_grad=True)
    with LiveBytes(known=[*layer.parameters(), hidden, gate]) as counter:
        output = layer(hidden, gate)
        assert counter.live == 5 * 64 + 4 * (5 * 4 + 5 * 32)
    output.sum().backward()


def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    assert len(compiled_for_a_gpu("gated_norms", 90, cache=tmp_path)) == 2 * 4


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_gradients_are_exact_to_float32(sigmoid: bool, first: bool) -> None:
    torch.manual_seed(0)
    formula = GatedFormula(1e-3, 3, sigmoid, first, whole=True)
    hidden, gate, gradient = inputs(torch.float32, 7, WIDTH)
    leaves = [hidden, gate, torch.randn(WIDTH, device=DEVICE, requires_grad=True)]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found, exact = GatedRMSNorm.apply(*leaves, *formula), reference(formula, *doubles)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    changes = torch.autograd.grad(found, leaves, gradient)
    wanted = torch.autograd.grad(exact, doubles, gradient.double())
    for change, want in zip(changes, wanted, strict=True):
        torch.testing.assert_close(change.double(), want, rtol=1e-4, atol=1e-5)


def reference(formula: GatedFormula, hidden: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    factor = gate.sigmoid() if formula.sigmoid else silu(gate)
    x = (hidden * factor if formula.first else hidden).unflatten(-1, (formula.groups, -1))
    x = (x * (x.square().mean(-1, keepdim=True) + formula.eps).rsqrt()).flatten(-2) * weight
    return x if formula.first else x * factor
