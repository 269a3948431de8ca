"""Rotary embeddings: those of transformers are recognised, and the Triton kernel, which the
interpreter runs where there is no accelerator, agrees with their own code and autograd."""

import importlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kernel_models import compiled_for_a_gpu
from torch import Tensor

from rlhf_devkit.families import FAMILIES
from rlhf_kernels import fused
from rlhf_kernels.fused import ROTARY, Rotary, calls_rotary, fuse
from rlhf_kernels.rotary import Formula, Rotation, formula_of

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OTHERS = {
    "clvp", "codegen", "deepseek_v4", "diffusion_gemma", "dinov3_vit", "eomt_dinov3", "gemma3n",
    "gemma4", "gemma4_unified", "gptj", "nanochat", "sapiens2",
}  # fmt: skip
"""Families whose function takes other arguments, or turns the other way (nanochat)."""
KINDS = {
    "llama": (8, 8, Formula(8, neighbours=False, shared=False)),
    "qwen3_5": (8, 4, Formula(4, neighbours=False, shared=False)),
    "gpt_oss": (8, 4, Formula(8, neighbours=False, shared=True)),
    "cohere": (12, 12, Formula(12, neighbours=True, shared=False)),
    "glm": (12, 8, Formula(8, neighbours=True, shared=True)),
}
"""A family of each kind, with the channels of its heads and the width of cos and sin."""


def own(family: str) -> Callable[..., Any]:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    found: Any = vars(module)[ROTARY]
    return found.original if isinstance(found, Rotary) else found


@cache
def families() -> list[str]:
    """The families that have such a function."""
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    found = [
        file for file in files if re.search(rf"^def {ROTARY}\(", file.read_text("utf-8"), re.M)
    ]
    return sorted(file.parent.name for file in found if file.stem == f"modeling_{file.parent.name}")


def test_functions_of_transformers_are_recognised() -> None:
    known = [formula_of(own(name), 8, 8) or formula_of(own(name), 8, 4) for name in families()]
    unknown = {name for name, formula in zip(families(), known, strict=True) if formula is None}
    assert unknown <= OTHERS
    assert len(known) > 150


@pytest.mark.parametrize("family", KINDS)
def test_what_a_function_computes_is_found(family: str) -> None:
    channels, width, formula = KINDS[family]
    assert formula_of(own(family), channels, width) == formula
    assert formula_of(own(family), 6, 16) is None


def test_what_is_no_rotation_of_both_is_not_recognised() -> None:
    llama: Any = own("llama")
    for wrong in (
        lambda *given: llama(*given)[0],
        lambda q, k, cos, sin: (llama(q, k, cos, sin)[0], k),
        lambda q, k, cos, sin: llama(q, k, cos, -sin),
        lambda q, k, cos, sin: llama(q, k, 2 * cos, sin),
        lambda q, k: (q, k),
        # Cos and sin of rows would be those of heads.
        lambda q, k, cos, sin: llama(q, k, cos, sin, unsqueeze_dim=0),
    ):
        assert formula_of(wrong, 8, 8) is None


def drawn(family: str, dtype: torch.dtype, rows: int, *, shared: bool) -> list[Tensor]:
    """Queries of 3 heads and keys of one, as projections leave them, with cos and sin of all
    rows, or of each."""
    channels, width, _ = KINDS[family]
    draw = torch.Generator().manual_seed(0)
    shapes = [(rows, 5, 3, channels), (rows, 5, 1, channels)]
    shapes += [(1 if shared else rows, 5, width)] * 2
    query, key, *numbers = (
        torch.randn(shape, generator=draw).to(DEVICE, dtype) for shape in shapes
    )
    return [query.transpose(1, 2), key.transpose(1, 2), *numbers]


def differentiated(rotate: Callable[..., Any], given: list[Tensor]) -> list[Tensor]:
    """Both results, and the gradients of queries and keys of their weighted sum."""
    query, key = (one.detach().requires_grad_() for one in given[:2])
    results = rotate(query, key, *given[2:])
    weights = [torch.arange(one.numel()).view_as(one).to(one) % 7 - 3 for one in results]
    # Gradients of attention lie otherwise in memory.
    weights[0] = weights[0].transpose(1, 2).contiguous().transpose(1, 2)
    return [*results, *torch.autograd.grad(results, (query, key), weights)]


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "of-each-row"])
@pytest.mark.parametrize("family", KINDS)
def test_the_kernel_gives_what_a_family_computes(family: str, *, shared: bool) -> None:
    given = drawn(family, torch.float32, 2, shared=shared)
    found = differentiated(Rotation(own(family)), given)
    assert "RotateBackward" in str(Rotation(own(family))(*leaves(given))[0].grad_fn)
    torch.testing.assert_close(found, differentiated(own(family), given), rtol=1e-5, atol=1e-5)


def leaves(given: list[Tensor]) -> list[Tensor]:
    return [one.detach().requires_grad_(number < 2) for number, one in enumerate(given)]


def test_sums_are_rounded_once() -> None:
    given = drawn("qwen3_5", torch.float16, 1, shared=True)
    found = differentiated(Rotation(own("qwen3_5")), given)
    exact = differentiated(own("qwen3_5"), [one.float() for one in given])
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.float16
        torch.testing.assert_close(one.float(), other, rtol=1e-3, atol=1e-3)


def test_heads_are_adjacent_in_memory_as_before() -> None:
    given = drawn("llama", torch.float32, 1, shared=True)
    for rotated in Rotation(own("llama"))(*given):
        assert rotated.transpose(1, 2).is_contiguous()


def test_other_arguments_are_left_to_the_family() -> None:
    rotate = Rotation(own("llama"))
    query, key, cos, sin = drawn("llama", torch.float32, 1, shared=True)
    tokens_first = [one.transpose(1, 2) for one in (query, key)]
    for given, options in (
        ([*tokens_first, cos, sin], {"unsqueeze_dim": 2}),
        ([query.bfloat16(), key.bfloat16(), cos, sin], {}),
        ([query[0], key[0], cos, sin], {}),
    ):
        results = rotate(*given, **options)
        torch.testing.assert_close(results, own("llama")(*given, **options), rtol=0, atol=0)


def test_cos_and_sin_of_one_token_rotate_all_tokens() -> None:
    query, key, cos, sin = drawn("llama", torch.float32, 2, shared=True)
    numbers = cos[:, 3:4], sin[:, 3:4]
    expected = own("llama")(query, key, *numbers)
    torch.testing.assert_close(Rotation(own("llama"))(query, key, *numbers), expected)


@pytest.mark.parametrize("shape", [(2, 1, 7, 8), (1, 1, 5, 8), (2, 1, 5, 6)])
def test_keys_of_other_rows_tokens_or_channels_are_left_to_the_family(shape: Any) -> None:
    query, _, cos, sin = drawn("llama", torch.float32, 2, shared=False)
    calls: list[Any] = []
    rotate = Rotation(own("llama"))
    rotate.formula(8, 8)
    rotate.own = lambda *given: calls.append(given)
    rotate(query, torch.zeros(shape, device=DEVICE), cos, sin)
    rotate(query, query, cos[:, :4], sin[:, :4])
    rotate(query, query, cos.expand(2, 5, 8).repeat(2, 1, 1), sin.repeat(2, 1, 1))
    rotate(query, query, cos, sin[..., :4])
    assert len(calls) == 4


def test_cos_and_sin_that_are_trained_get_gradients() -> None:
    query, key, cos, sin = drawn("llama", torch.float32, 1, shared=True)
    cos.requires_grad_()
    rotated, _ = Rotation(own("llama"))(query.requires_grad_(), key, cos, sin)
    rotated.sum().backward()
    assert cos.grad is not None


def test_a_family_without_kernels_of_liger_gets_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as code

    own_function = own("qwen3_5")
    monkeypatch.setattr(code, ROTARY, own_function)
    monkeypatch.setattr(fused, "fused_on", lambda kind: True)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        layer_types=["full_attention"], num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    for device in ("meta", "cpu"):
        with torch.device("meta"):
            decoder = transformers.AutoModel.from_config(config)
        said = fuse(decoder, "auto", torch.device(device))
        assert "rotary embedding" in said
    replaced: Any = vars(code)[ROTARY]
    assert isinstance(replaced.fused, Rotation)
    assert replaced.original is own_function


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("Llama", {}, True),
        ("Qwen3.5", {}, True),
        ("DeepSeek V3", {}, False),
        ("DeepSeek V3", {"rope_interleave": False}, True),
        ("GPT-2", {}, False),
        ("Nemotron-H", {}, False),
    ],
)
def test_only_a_function_that_layers_call_is_replaced(
    family: str, options: dict[str, Any], *, expected: bool
) -> None:
    config, sizes = FAMILIES[family]
    with torch.device("meta"):
        decoder = transformers.AutoModel.from_config(
            getattr(transformers, config)(**sizes | options)
        )
    assert calls_rotary(decoder) == expected


def test_the_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    assert len(compiled_for_a_gpu("rotary", 90, cache=tmp_path)) == 6
