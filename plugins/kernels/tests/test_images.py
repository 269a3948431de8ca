"""Images read without waits: the values of torch's and transformers' own operations."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionPooler
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel
from transformers.vision_utils import get_vision_attention_seqlens, get_vision_position_ids

from rlhf_devkit.waits import Waits
from rlhf_kernels.image_sizes import Indices, Placeholders, Sizes, with_sizes
from rlhf_kernels.images import (
    FAMILIES,
    MASKS,
    OF_SIZES,
    PLACEHOLDERS,
    REPLACED,
    CheckedOnce,
    add_features,
    join_crops,
    of_one_sequence,
    on_host,
    pool_patches,
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

    find = CheckedOnce(lambda tokens, **_: tokens, 9)
    assert read_images(features, find, FEATURES, on_meta(), scale=4) == [2, 4]


def test_sizes_of_one_image_are_on_the_host() -> None:
    sizes = with_sizes(on_meta())
    assert torch.equal(sizes[1], GRID[1])
    assert [size.tolist() for size in sizes] == GRID.tolist()
    assert sizes[:, 1:].is_meta


@pytest.mark.parametrize(
    "compute",
    [
        lambda it: (it[:, 1, None] // 2) * (it[:, 2, None] // 2),
        lambda it: (it > 0)._is_all_true(),
        lambda it: (it.prod(-1) <= 8).all(),
        lambda it: ~(it == 4).all(dim=-1).to(device=it.device, dtype=torch.bool),
        lambda it: (it != 4).sum(dim=-1).to(torch.int32),
    ],
)
def test_results_of_sizes_are_known_on_the_host(compute: Any) -> None:
    found, expected = compute(with_sizes(on_meta())), compute(GRID)
    assert type(found) is Sizes
    assert found.is_meta
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()


def test_sizes_pass_a_function_of_autograd() -> None:
    """As DeepSpeed has for the inputs of each module at stage 3."""

    class Passed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor) -> Tensor:
            return inputs.detach()

    assert Passed.apply(with_sizes(on_meta())).tolist() == GRID.tolist()


def test_results_of_sizes_and_other_tensors_are_not_known() -> None:
    sizes = with_sizes(on_meta())
    for result in (sizes + 1, sizes * torch.ones(3, device="meta"), sizes[:, torch.tensor([0])]):
        assert type(result) is Tensor
    assert bool((sizes > 0).all())


def test_numbers_less_than_a_size_are_as_many_as_it_says() -> None:
    sizes: Any = torch.tensor([[3], [1]])
    sizes.host = sizes.clone()
    mask = torch.arange(4)[None] < with_sizes(sizes)
    values = torch.arange(8.0).view(4, 2).repeat(2, 1)
    found, expected = mask.flatten(), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool().flatten()
    assert torch.equal(values[found], values[expected])
    assert found.tolist() == [0, 1, 2, 4]


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


def test_the_number_of_placeholders_is_read_without_a_wait() -> None:
    mask = placeholders()
    with Waits() as waits:
        assert f"{mask.sum()} tokens" == "3 tokens"
    assert waits.found == []


def test_a_mask_may_be_found_before_the_features() -> None:
    """As in Gemma 4."""
    embeddings = torch.arange(32.0).view(2, 4, 4)

    def own(input_ids: Tensor, *, inputs_embeds: Any) -> tuple[Tensor, Tensor]:
        return input_ids == 9, input_ids == 8

    find = CheckedOnce(own, 9)
    output = type("Output", (), {"pooler_output": FEATURES.split([1, 2])})
    results = []
    for _ in range(3):
        mask, other = find(MASK * 9, None)
        assert type(other) is Tensor
        assert type(mask | other) is Tensor
        read_images(lambda: output, find)
        results.append(mask)
    assert [type(mask) for mask in results] == [Tensor, Placeholders, Placeholders]
    whole = results[-1].unsqueeze(-1).expand_as(embeddings).to(embeddings.device)
    assert type(whole) is Indices
    plain = results[0].unsqueeze(-1).expand_as(embeddings)
    assert torch.equal(embeddings[whole].flatten(), embeddings[plain])
    for mask in (plain, whole):
        row, features = embeddings.clone().requires_grad_(), FEATURES.clone().requires_grad_()
        placed = row.masked_scatter(mask, features)
        torch.autograd.backward((placed * embeddings).sum())
        results.append((placed.detach(), row.grad, features.grad))
    for expected, found in zip(*results[-2:], strict=True):
        assert torch.equal(expected, found)


def test_a_mask_without_features_stays_a_mask() -> None:
    find = CheckedOnce(lambda tokens, inputs_embeds: (tokens == 9, None), 9)
    find(MASK * 9, None)
    mask, _ = find(MASK * 9, None)
    assert mask.sum() == 3
    assert torch.equal(mask.flatten(), MASK.flatten())
    expected = torch.zeros(2, 4, 4).masked_scatter(MASK[..., None], FEATURES)
    assert torch.equal(torch.zeros(2, 4, 4).masked_scatter(mask[..., None], FEATURES), expected)


def test_pooled_patches_are_found_by_the_positions_on_the_host() -> None:
    config = Gemma4VisionConfig(hidden_size=4)
    own = Gemma4VisionPooler(config)._avg_pool_by_positions
    positions: Any = torch.full((2, 16, 2), -1)
    for number, (height, width) in enumerate(((2, 4), (4, 4))):
        grid = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(-1)
        positions[number, : len(grid)] = grid
    states = torch.arange(128.0).view(2, 16, 4)
    expected, mask = own(states, positions, 4)
    assert torch.equal(pool_patches(own, states, positions, 4)[1], mask)
    positions.host = positions.clone()
    with Waits() as waits:
        waits.place(positions.host, on_host=True)
        pooled, places = pool_patches(own, states, with_sizes(positions), 4)
        found = pooled[places]
    assert waits.found == []
    assert torch.equal(found, expected[mask])


def test_numbers_of_crops_are_copied_without_a_wait() -> None:
    def own(numbers: list[int], device: torch.device) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    with Waits() as waits:
        found = join_crops(own, [1, 2], torch.device("cpu"))
        assert not waits.is_on_host(found)
    assert waits.found == []
    assert torch.equal(found, torch.tensor([1, 2], dtype=torch.int32))
    assert join_crops(lambda: torch.tensor([3])).tolist() == [3]


def test_masks_of_one_sequence_do_not_depend_on_positions() -> None:
    assert of_one_sequence(dict)(position_ids=GRID, cache=1) == {"position_ids": None, "cache": 1}
    assert of_one_sequence(dict)(cache=1) == {"cache": 1}


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


METHODS = {
    "gemma4": {"_avg_pool_by_positions"},
    "llava_next": {"pack_image_features"},
    "llava_onevision": {"pack_image_features"},
    "qwen3_vl": {"_deepstack_process"},
    "qwen3_vl_moe": {"_deepstack_process"},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_what_is_replaced(name: str) -> None:
    code = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    replaced = {each for each in vars(code) if each.startswith(OF_SIZES)}
    assert bool(replaced) == (name.startswith(("qwen", "glm")))
    assert (MASKS in vars(code)) == name.startswith("gemma")
    methods = {each for each in REPLACED for kind in vars(code).values() if hasattr(kind, each)}
    assert methods == METHODS.get(name, set())
    kinds = [each for each in vars(code).values() if hasattr(each, PLACEHOLDERS)]
    assert any(hasattr(kind, FEATURES_OF) for kind in kinds)
