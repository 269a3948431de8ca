"""Fused layers of vision towers against torch's operators and transformers' own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3VLVisionConfig
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen

from rlhf.forwards import replaced_forward
from rlhf_kernels.fused import Rotary
from rlhf_kernels.towers import ROTARY, embed_patches, fuse_tower, rotate_patches, rotates_halves

OWN = qwen.apply_rotary_pos_emb_vision


def swap_pairs(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.stack([-states[..., 1::2], states[..., ::2]], -1).flatten(-2)
    return states * cos.unsqueeze(-2) + pairs * sin.unsqueeze(-2)


def interleaved(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return swap_pairs(query, cos, sin), swap_pairs(key, cos, sin)


def minimax(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    size = cos.shape[-1]
    rotated = OWN(query[..., :size], key[..., :size], cos, sin)
    return torch.cat([rotated[0], query[..., size:]], -1), torch.cat(
        [rotated[1], key[..., size:]], -1
    )


def liger(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """What Liger's kernel computes of [1, heads, T, C]."""
    assert rest == (None, 1)
    rotated = []
    for states in (query, key):
        first, second = states.float().chunk(2, -1)
        angles = (part[:, None, :, : first.shape[-1]] for part in (cos, sin))
        c, s = angles
        rotated += [torch.cat([first * c - second * s, second * c + first * s], -1)]
    return tuple(states.to(query.dtype) for states in rotated)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv3d])
def test_patches_are_embedded_as_by_the_convolution(kind: Any) -> None:
    torch.manual_seed(0)
    conv = kind(3, 8, 4, stride=4)
    dims = 2 if kind is nn.Conv2d else 3
    patches = torch.randn(5, 3, *[4] * dims)
    torch.testing.assert_close(embed_patches(conv, patches), conv(patches))
    whole = torch.randn(2, 3, *[8] * dims)
    assert torch.equal(embed_patches(conv, whole), conv(whole))
    fuse_tower([conv, overlapping := kind(3, 8, 4, stride=2), padded := kind(3, 8, 4, 4, 1)])
    assert replaced_forward(conv) is not None
    assert replaced_forward(overlapping) is replaced_forward(padded) is None
    torch.testing.assert_close(conv(patches), embed_patches(conv, patches))


def test_a_convolution_with_a_forward_of_its_own_is_kept() -> None:
    class Standardized(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            weight = self.weight - self.weight.mean()
            return nn.functional.conv2d(input, weight, self.bias, self.stride)

    conv, patches = Standardized(3, 8, 4, stride=4), torch.randn(5, 3, 4, 4)
    expected = conv(patches)
    fuse_tower([conv])
    assert torch.equal(conv(patches), expected)


def test_patches_are_rotated_as_by_transformers() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 7, 2, 8).to(torch.bfloat16)
    angles = torch.randn(7, 4).repeat(1, 2)
    expected = OWN(query, key, angles.cos(), angles.sin())
    found = rotate_patches(liger, OWN, query, key, angles.cos(), angles.sin())
    assert all(map(torch.equal, found, expected))


def test_patches_of_other_shapes_are_rotated_by_the_family() -> None:
    """Step 3.7 and Kimi K2.5 have a dimension of images, MiniMax M3 rotates a part of each head."""
    torch.manual_seed(0)
    cos, sin = torch.randn(2, 3, 7, 8)
    query, key = torch.randn(2, 3, 7, 2, 8)
    for shape in ((1, 7, 8), (3, 7, 8)):
        angles = cos[: shape[0]], sin[: shape[0]]
        found = rotate_patches(liger, OWN, query, key, *angles)
        assert all(map(torch.equal, found, OWN(query, key, *angles)))
    found = rotate_patches(liger, minimax, query[0], key[0], cos[0, :, :4], sin[0, :, :4])
    expected = minimax(query[0], key[0], cos[0, :, :4], sin[0, :, :4])
    assert all(map(torch.equal, found, expected))


def test_only_the_rotary_embedding_that_the_kernel_computes_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("liger_kernel")
    assert rotates_halves(OWN)
    assert not rotates_halves(interleaved)
    assert not rotates_halves(lambda query, positions: query)
    assert not rotates_halves(lambda query, key, cos, sin: cos.unsqueeze(3) * query)
    tower = qwen.Qwen3VLVisionModel(
        Qwen3VLVisionConfig(
            depth=1, hidden_size=16, intermediate_size=32, num_heads=2, out_hidden_size=16,
            num_position_embeddings=16, patch_size=2, deepstack_visual_indexes=[],
        )
    )  # fmt: skip
    pixels, grid = torch.randn(8, 3 * 2 * 2 * 2), torch.tensor([[1, 2, 4]])
    before = tower(pixels, grid_thw=grid).pooler_output
    monkeypatch.setattr(qwen, ROTARY, interleaved)
    fuse_tower(tower.modules())
    assert getattr(qwen, ROTARY) is interleaved
    monkeypatch.setattr(qwen, ROTARY, OWN)
    fuse_tower(tower.modules())
    fuse_tower(tower.modules())
    rotary = getattr(qwen, ROTARY)
    assert isinstance(rotary, Rotary)
    assert rotary.original is OWN
    # On the CPU the family's own function runs.
    torch.testing.assert_close(tower(pixels, grid_thw=grid).pooler_output, before)
