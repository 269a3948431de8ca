"""A vision tower with fused layers on a CUDA device against its own layers."""

from typing import Any

import pytest
import torch
from transformers import Qwen3VLVisionConfig
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen

from rlhf_kernels.fused import Rotary
from rlhf_kernels.towers import ROTARY, fuse_tower

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_and_gradients_are_those_of_the_tower(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qwen, ROTARY, qwen.apply_rotary_pos_emb_vision)
    # cuDNN's convolution rounds float32 to TF32, the product of the fused layer does not.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    tower = qwen.Qwen3VLVisionModel(
        Qwen3VLVisionConfig(
            depth=2, hidden_size=144, intermediate_size=64, num_heads=2, out_hidden_size=32,
            num_position_embeddings=64, patch_size=4, deepstack_visual_indexes=[],
        )
    ).to("cuda", dtype)  # fmt: skip
    grid = torch.tensor([[1, 4, 6], [1, 2, 8]], device="cuda")
    pixels = torch.randn(40, 3 * 2 * 4 * 4, device="cuda", dtype=dtype)

    def run() -> list[Any]:
        tower.zero_grad()
        features = tower(pixels, grid_thw=grid).pooler_output
        features.float().square().sum().backward()
        return [features.detach(), *(parameter.grad for parameter in tower.parameters())]

    expected = run()
    fuse_tower(tower.modules())
    assert isinstance(getattr(qwen, ROTARY), Rotary)
    bound = 1e-4 if dtype == torch.float32 else 4e-2
    for found, own in zip(run(), expected, strict=True):
        scale = own.abs().max().clamp(min=1e-6)
        assert (found - own).abs().max() <= bound * scale
