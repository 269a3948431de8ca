"""Models that read images, without a wait of the host for the device.

transformers reads the sizes of images from the device, several times per pass, to compute indices.
Here the host computes them from its own copy of the sizes (`PackedBatch.to`). transformers also
selects the tokens that stand for images by a mask, and the host waits for their number. Here their
number is that of the features, so their places are found on the device.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from rlhf.engine import on_device
from rlhf_kernels.image_sizes import Indices, Placeholders, Sizes, moved, one_thread, with_sizes

FAMILIES = (
    "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "llava",
    "internvl", "gemma3", "gemma4", "mistral3", "lfm2_vl", "llava_next", "llava_onevision",
)  # fmt: skip
"""Families in which only what this file replaces makes the host wait, if they have it."""
CODE = {f"transformers.models.{name}.modeling_{name}" for name in FAMILIES}
OF_SIZES = ("get_vision_", "get_max_seqlen")
"""Prefixes of these functions in a family's module."""
FEATURES, PLACEHOLDERS = "get_image_features", "get_placeholder_mask"
"""Methods that compute features of images, and that find the tokens which stand for them."""
MASKS = "create_masks_for_vision_model"
"""Function that makes masks of a row whose tokens of images see one another."""


def read_without_waits(modules: Iterable[nn.Module]) -> None:
    """Have the modules of a model, its towers, what calls them and its decoder, read images without
    waits, in place. Functions of their family's module are replaced too."""
    modules = [module for module in modules if type(module).__module__ in CODE]
    for code in {type(module).__module__ for module in modules}:
        family = vars(sys.modules[code])
        for name in [name for name in family if name.startswith(OF_SIZES)]:
            if family[name].__module__ != __name__:
                family[name] = on_host(family[name])
        if MASKS in family and family[MASKS].__module__ != __name__:
            family[MASKS] = of_one_sequence(family[MASKS])
    for module in modules:
        methods = vars(module)
        if hasattr(module, PLACEHOLDERS) and PLACEHOLDERS not in methods:
            own = getattr(module, FEATURES)
            config: Any = module.config
            find = CheckedOnce(getattr(module, PLACEHOLDERS), config.image_token_id)
            read: Any = partial(read_images, own, find)
            read.__signature__ = inspect.signature(own)  # `generate` looks at it.
            methods[FEATURES], methods[PLACEHOLDERS] = read, find
        for name, function in REPLACED.items():
            if hasattr(module, name) and name not in methods:
                methods[name] = partial(function, getattr(module, name))


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of sizes that computes on the host if it has them there, and moves the
    results to their device."""

    def computed(sizes: Tensor, *args: Any, **kwargs: Any) -> Any:
        host = getattr(sizes, "host", None)
        if host is None:
            return function(sizes, *args, **kwargs)
        with one_thread():
            results = function(host, *args, **kwargs)
            return tree_map_only(Tensor, partial(moved, sizes.device), results)

    return computed


def of_one_sequence(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of masks that does not search positions for the ends of sequences, as it
    does for rows without a mask and a cache: such a row is one sequence here."""

    def made(**kwargs: Any) -> Any:
        return function(**{**kwargs, **dict.fromkeys(kwargs.keys() & {"position_ids"})})

    return made


def read_images(own: Callable[..., Any], find: "CheckedOnce", *args: Any, **kwargs: Any) -> Any:
    """Return a model's features of images, which `own` splits into those of each image."""
    named = {name: with_sizes(value) for name, value in kwargs.items()}
    features = own(*map(with_sizes, args), **named)
    find.select(features)
    return features


class CheckedOnce:
    """A model's `get_placeholder_mask`: the host compares the numbers of tokens and features in the
    first call only, as `own` does, and the device in later ones. `token` stands for images."""

    def __init__(self, own: Callable[..., Any], token: int) -> None:
        self.own = own
        self.token = token
        self.returns_two: bool | None = None
        """Whether `own` also returns a mask of videos; None before the first call."""
        self.later: Placeholders | None = None
        """A mask that was found before the features were computed."""

    def __call__(self, input_ids: Tensor | None, inputs_embeds: Any, **features: Any) -> Any:
        images, first = features.get("image_features"), self.returns_two is None
        if first or input_ids is None or images is None or len(features) > 1:
            masks = self.own(input_ids, inputs_embeds=inputs_embeds, **features)
            self.returns_two = isinstance(masks, tuple)
            if not features and not first:
                self.later = masks[0].as_subclass(Placeholders)
                return (self.later, *masks[1:])
            return masks
        number = images.numel() // inputs_embeds.shape[-1]
        placeholders = Placeholders.of(input_ids == self.token, number)[..., None]
        return (placeholders, None) if self.returns_two else placeholders

    def select(self, features: Any) -> None:
        """Note for a mask how many features there are."""
        if self.later is not None:
            rows = features.pooler_output
            self.later.find(len(rows) if isinstance(rows, Tensor) else sum(map(len, rows)))
        self.later = None


def pool_patches(
    own: Callable[..., Any], states: Tensor, positions: Tensor, length: int
) -> tuple[Tensor, Any]:
    """Return pooled states [N, `length`, H] and which of them have patches. Positions are -1 where
    an image has no patch."""
    pooled, mask = own(states, positions, length)
    if isinstance(positions, Sizes):
        with one_thread():
            patches = (positions.host != -1).all(-1).sum(-1)
        number = int((patches // (positions.shape[1] // length)).sum())
        mask = Indices.of(Placeholders.of(mask, number))
    return pooled, mask


def add_features(
    own: Callable[..., Tensor], hidden_states: Tensor, mask: Tensor, features: Tensor
) -> Tensor:
    """Return hidden states [B, T, H] with features [N, H] added for the tokens in `mask`."""
    if not isinstance(mask, Placeholders):
        return own(hidden_states, mask, features)
    rows, features = hidden_states.flatten(0, 1), features.to(hidden_states)
    return rows.index_add(0, mask.places, features).view_as(hidden_states)


def join_crops(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a model's `own` method, which also copies the numbers of features to the device."""
    with PageLocked():
        return own(*args, **kwargs)


class PageLocked(TorchFunctionMode):
    """A context in which what `torch.tensor` makes is copied to a device without a wait."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.pop("device", None) if func is torch.tensor else None
        result = func(*args, **kwargs)
        return result if device is None else on_device(result, device)


REPLACED: dict[str, Callable[..., Any]] = {
    "_avg_pool_by_positions": pool_patches,
    "_deepstack_process": add_features,
    "pack_image_features": join_crops,
}
"""What replaces other methods of a model and its towers; each gets the model's own first."""
