"""Images read without waits: the values of torch's and transformers' own operations."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel
from transformers.vision_utils import get_vision_attention_seqlens, get_vision_position_ids

from rlhf_kernels.images import (
    FAMILIES,
    OF_SIZES,
    PLACEHOLDERS,
    CheckedOnce,
    Placeholders,
    add_features,
    on_host,
    read_images,
)
from rlhf_kernels.images import FEATURES as FEATURES_OF

GRID = torch.tensor([[1, 2, 4], [1, 4, 4]])
MASK = torch.tensor([[False, True, False, True], [True, False, False, False]])
FEATURES = torch.arange(12.0).view(3, 4)


def on_meta() -> Any:
    """Return the sizes on a device from which nothing can be read."""
    grid: Any = GRID.to("meta")
    grid.host = GRID
    return grid


def test_indices_are_computed_from_the_sizes_on_the_host() -> None:
    found: Any = on_host(get_vision_position_ids)(on_meta(), 2)
    assert found.is_meta
    assert torch.equal(found.host, get_vision_position_ids(GRID, 2))
    config = type("Config", (), {"_attn_implementation": "rlhf_flash_images"})
    ends, longest = on_host(get_vision_attention_seqlens)(on_meta(), config)
    assert (ends.host.tolist(), longest) == ([0, 8, 24], 16)


def test_indices_are_computed_in_one_thread() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found: Any = on_host(lambda sizes: sizes * torch.get_num_threads())(on_meta())
        assert torch.equal(found.host, GRID)
        with pytest.raises(IndexError):
            on_host(lambda sizes: sizes[:, 3])(on_meta())
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_sizes_without_a_copy_on_the_host_are_read_where_they_are() -> None:
    found = on_host(get_vision_position_ids)(GRID, 2)
    assert torch.equal(found, get_vision_position_ids(GRID, 2))
    assert not hasattr(found, "host")


def test_features_are_split_by_sizes_on_the_host() -> None:
    def features(pixels: Tensor, grid: Tensor, *, scale: int) -> list[int]:
        assert grid.is_meta
        assert not hasattr(grid + 1, "host")
        return (grid.prod(-1) // scale).tolist()

    assert read_images(features, FEATURES, on_meta(), scale=4) == [2, 4]


def placeholders() -> Placeholders:
    return Placeholders.of(MASK[..., None].clone(), 3)


def test_features_take_the_places_of_their_tokens() -> None:
    results = []
    for mask in (MASK[..., None], placeholders()):
        row = torch.ones(2, 4, 4, requires_grad=True)
        features = FEATURES.clone().requires_grad_()
        placed = row.masked_scatter(mask, features)
        torch.autograd.backward((placed * torch.arange(32.0).view(2, 4, 4)).sum())
        results.append((placed.detach(), row.grad, features.grad))
    for expected, found in zip(*results, strict=True):
        assert expected is not None
        assert torch.equal(expected, found)
        assert type(found) is Tensor


def test_features_are_added_to_their_tokens() -> None:
    own: Any = Qwen3VLTextModel._deepstack_process
    results = []
    for mask in (MASK, placeholders()[..., 0].to("cpu")):
        hidden = torch.ones(2, 4, 4, requires_grad=True)
        features = FEATURES.clone().requires_grad_()
        added = add_features(lambda *given: own(None, *given), hidden, mask, features)
        torch.autograd.backward((added * torch.arange(32.0).view(2, 4, 4)).sum())
        results.append((added.detach(), hidden.grad, features.grad))
    for expected, found in zip(*results, strict=True):
        assert expected is not None
        assert torch.equal(expected, found)


def test_only_views_of_all_tokens_know_the_places() -> None:
    mask = placeholders()
    assert mask[..., 0].places.tolist() == [1, 3, 4]  # type: ignore[attr-defined]
    for other in (mask[:1], ~mask, mask.sum(), torch.ones(2, 4, 1)[mask]):
        assert type(other) is Tensor


@pytest.mark.parametrize("videos", [True, False])
def test_tokens_and_features_are_compared_in_every_call(*, videos: bool) -> None:
    def own(input_ids: Tensor, *, inputs_embeds: Tensor, image_features: Tensor) -> Any:
        mask = (input_ids == 9)[..., None]
        if mask.sum() * inputs_embeds.shape[-1] != image_features.numel():
            raise ValueError("by the model")
        return (mask, ~mask) if videos else mask

    tokens, embeddings = MASK * 9, torch.zeros(2, 4, 4)
    with pytest.raises(ValueError, match="by the model"):
        CheckedOnce(own, 9)(tokens, inputs_embeds=embeddings, image_features=FEATURES[:2])
    find = CheckedOnce(own, 9)
    for kind in (Tensor, Placeholders):
        masks = find(tokens, inputs_embeds=embeddings, image_features=FEATURES[None])
        mask = masks[0] if videos else masks
        assert type(mask) is kind
        assert torch.equal(mask, MASK[..., None])
    with pytest.raises(RuntimeError, match="stand for images are not as many as their features"):
        find(tokens, inputs_embeds=embeddings, image_features=FEATURES[:2])


@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_what_is_replaced(name: str) -> None:
    code = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    replaced = [each for each in vars(code) if each.startswith(OF_SIZES)]
    assert bool(replaced) == (name not in ("llava", "internvl"))
    kinds = [each for each in vars(code).values() if hasattr(each, PLACEHOLDERS)]
    assert any(hasattr(kind, FEATURES_OF) for kind in kinds)
