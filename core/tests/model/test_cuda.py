"""Tree attention on a CUDA device against one path at a time, and its gradients."""

from typing import Any

import pytest
import torch
from engines import BareEngine
from families import TREES, on_cuda

from rlhf.engine import Mesh
from rlhf.model.packed import PackedModel
from rlhf.model.probe import choose_path
from rlhf.readouts import token_logprobs
from rlhf_devkit.families import gradients, tree_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class CudaEngine(BareEngine):
    device = torch.device("cuda")

    def __init__(self, module: PackedModel, precision: str) -> None:
        super().__init__(module)
        self.precision = precision


def run(module: PackedModel, path: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    module.path = path
    found = module(tree_batch().to(torch.device("cuda")), token_logprobs)["logprobs"]
    (found * torch.linspace(-1, 2, len(found), device="cuda")).sum().backward()
    return found.detach(), gradients(module.causal)


@pytest.mark.parametrize("name", TREES)
def test_the_probe_chooses_the_tree_and_its_gradients_are_right(name: str) -> None:
    module = on_cuda(name, torch.float32)
    choice = choose_path(CudaEngine(module, "fp32"), Mesh(device=torch.device("cuda")))
    assert choice.path == "tree", str(choice)
    logprobs, expected = run(module, "separate")
    found, actual = run(module, "tree")
    torch.testing.assert_close(found, logprobs, rtol=1e-3, atol=1e-3)
    for parameter, gradient in expected.items():
        scale = float(gradient.abs().max()) + 1e-3
        torch.testing.assert_close(
            actual[parameter] / scale, gradient / scale, rtol=0, atol=2e-3, msg=parameter
        )


@pytest.mark.parametrize("name", TREES)
def test_the_probe_chooses_the_tree_in_bf16(name: str) -> None:
    module = on_cuda(name, torch.bfloat16)
    choice = choose_path(CudaEngine(module, "bf16"), Mesh(device=torch.device("cuda")))
    assert choice.path == "tree", str(choice)
