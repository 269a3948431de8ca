"""Scans of recurrent layers by the installed libraries, on CUDA."""

import warnings
from importlib.util import find_spec

import pytest
import torch
import transformers

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
    config, options = FAMILIES[name]
    found = []
    for there in (True, False):
        torch.manual_seed(0)
        kind = getattr(transformers, config)(**options | WIDE[name])
        causal = transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.bfloat16)
        module = PackedModel(causal.to("cuda")).train()
        monkeypatch.setattr(scans.Scans, "choose", scans.Scans.choose if there else none)
        with warnings.catch_warnings():
            # A library that is not used says so.
            warnings.filterwarnings("error", ".* of recurrent layers run in plain torch")
            values = module(tree_batch().to(torch.device("cuda")), token_logprobs)["logprobs"]
        values.sum().backward()
        found.append((values.detach().float(), gradients(module.causal)))
    (ours, one), (theirs, other) = found
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    for key, gradient in one.items():
        error = (gradient.float() - other[key].float()).norm()
        assert error < 5e-2 * other[key].float().norm() + 1e-3, key


def none(*_: object) -> None:
    """No library."""
