"""Scans of recurrent layers by the installed libraries, on CUDA."""

import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from rlhf.model.packed import PackedModel
from rlhf.readouts import token_logprobs
from rlhf_devkit.families import FAMILIES, gradients, tree_batch
from rlhf_kernels import scans

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
WIDE = {
    "Qwen3.5": {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "hidden_size": 128},
    "Bamba": {"mamba_d_head": 64, "mamba_n_heads": 4, "hidden_size": 128, "mamba_d_state": 64},
    "LFM2": {},
}
"""Sizes for which the libraries have kernels."""


@pytest.mark.parametrize(
    ("name", "package"), [("Qwen3.5", "fla"), ("Bamba", "fla"), ("LFM2", "triton")]
)
def test_a_library_gives_the_trees_that_torch_gives(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")
    choose = scans.Scans.choose
    exact = computed(name, torch.float32, none, monkeypatch)
    by_torch = computed(name, torch.bfloat16, none, monkeypatch)
    found = computed(name, torch.bfloat16, choose, monkeypatch)
    for key, value in exact.items():
        rounding, error = ((one[key] - value).norm() for one in (by_torch, found))
        assert error < 2 * rounding + 1e-2 * value.norm() + 1e-6, key


def computed(
    name: str, dtype: torch.dtype, choose: Any, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Tensor]:
    """Log-probabilities of a family's trees and all gradients, in float32, by what `choose`
    returns."""
    config, options = FAMILIES[name]
    torch.manual_seed(0)
    kind = getattr(transformers, config)(**options | WIDE[name])
    causal = transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.bfloat16)
    module = PackedModel(causal.to(dtype).to("cuda")).train()
    monkeypatch.setattr(scans.Scans, "choose", choose)
    with warnings.catch_warnings():
        # A library that is not used says so.
        warnings.filterwarnings("error", ".* of recurrent layers run in plain torch")
        values = module(tree_batch().to(torch.device("cuda")), token_logprobs)["logprobs"]
    values.sum().backward()
    found = gradients(module.causal) | {"log-probabilities": values.detach()}
    return {key: one.float() for key, one in found.items()}


def none(*_: object) -> None:
    """No library."""
