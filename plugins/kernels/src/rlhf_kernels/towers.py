"""Fused layers of vision towers: patches become embeddings by one product, and queries and keys are
rotated by Liger's kernel."""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.engine import replace_forward
from rlhf_kernels.fused import Rotary
from rlhf_kernels.liger import liger_module

ROTARY = "apply_rotary_pos_emb_vision"
"""Name of the rotary embedding of towers in a family's module."""


def fuse_tower(modules: Iterable[nn.Module]) -> None:
    """Fuse layers among the modules of a model that read images, in place; those on other devices
    than CUDA run their own functions."""
    modules = [*modules]
    for module in modules:
        if isinstance(module, nn.Conv2d | nn.Conv3d) and takes_patches(module):
            replace_forward(module, partial(embed_patches, module))
    for name in {type(module).__module__ for module in modules}:
        family = vars(sys.modules[name])
        own = family.get(ROTARY)
        if own is not None and not isinstance(own, Rotary) and rotates_halves(own):
            kernel = liger_module("rope").LigerRopeFunction.apply
            family[ROTARY] = Rotary(partial(rotate_patches, kernel, own), own)


def takes_patches(conv: nn.Conv2d | nn.Conv3d) -> bool:
    """Return whether a convolution computes each patch by itself: none overlaps another."""
    # A subclass may compute something else, such as timm's, which pad or scale.
    own = type(conv) in (nn.Conv2d, nn.Conv3d)
    plain = conv.groups == 1 and not any(conv.padding) and {*conv.dilation} == {1}
    return own and plain and conv.stride == conv.kernel_size


def embed_patches(conv: nn.Conv2d | nn.Conv3d, images: Tensor) -> Tensor:
    """Return `conv(images)`: by one product if each image is one patch, as Qwen's processors
    prepare them. cuDNN is slow at that (benchmarks/NOTES.md, Rows with images: the tower)."""
    if tuple(images.shape[2:]) != tuple(conv.kernel_size):
        kind: Any = type(conv)
        own: Tensor = kind.forward(conv, images)
        return own
    product = nn.functional.linear(images.flatten(1), conv.weight.flatten(1), conv.bias)
    return product.view(*product.shape, *[1] * len(conv.kernel_size))


def rotate_patches(
    kernel: Callable[..., Any],
    own: Callable[..., Any],
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate queries and keys [patches, heads, C] by cos and sin [patches, C], computed in float32
    as transformers does. Those of other shapes, such as [images, patches, heads, C], are rotated by
    `own`, as are heads of which cos covers only a part."""
    if query.dim() != 3 or cos.shape != (len(query), query.shape[-1]):
        rotated: tuple[Tensor, Tensor] = own(query, key, cos, sin)
        return rotated
    heads_first = (states[None].transpose(1, 2) for states in (query, key))
    queries, keys, *_ = kernel(*heads_first, cos.float()[None], sin.float()[None], None, 1)
    return queries.transpose(1, 2).squeeze(0), keys.transpose(1, 2).squeeze(0)


def rotates_halves(rotary: Callable[..., Any]) -> bool:
    """Return whether `rotary(query, key, cos, sin)` rotates the first half of each head's channels
    with the second, as the kernel does; it looks at one patch."""
    cos, sin = torch.tensor([[0.8, 0.6, 0.8, 0.6]]), torch.tensor([[0.6, -0.8, 0.6, -0.8]])
    states = [torch.arange(start, start + 8.0).view(1, 2, 4) for start in (0, 8)]
    rotated = [s * cos + torch.cat([-s[..., 2:], s[..., :2]], -1) * sin for s in states]
    try:
        return all(map(torch.allclose, rotary(*states, cos, sin), rotated))
    except Exception:  # A function with another signature or other shapes may raise anything.
        return False
