"""Models that read images, without a wait of the host for the device.

transformers reads the sizes of images from the device, several times per pass, to compute indices.
Here the host computes them from its own copy of the sizes (`PackedBatch.to`). transformers also
selects the tokens that stand for images by a mask, and the host waits for their number. Here their
number is that of the features, so their places are found on the device.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rlhf.engine import on_device

FAMILIES = (
    "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "llava",
    "internvl",
)  # fmt: skip
"""Families whose towers read sizes only in functions that this file replaces, if they have any."""
CODE = {f"transformers.models.{name}.modeling_{name}" for name in FAMILIES}
OF_SIZES = ("get_vision_", "get_max_seqlen")
"""Prefixes of these functions in a family's module."""
FEATURES, PLACEHOLDERS = "get_image_features", "get_placeholder_mask"
"""Methods that compute features of images, and that find the tokens which stand for them."""
DEEP = "_deepstack_process"
"""Method that adds features of images to the hidden states after a layer."""


def read_without_waits(modules: Iterable[nn.Module]) -> None:
    """Have the modules of a model, its towers, what calls them and its decoder, read images without
    waits, in place. Functions of their family's module are replaced too."""
    modules = [module for module in modules if type(module).__module__ in CODE]
    for code in {type(module).__module__ for module in modules}:
        family = vars(sys.modules[code])
        for name in [name for name in family if name.startswith(OF_SIZES)]:
            if family[name].__module__ != __name__:
                family[name] = on_host(family[name])
    for module in modules:
        methods = vars(module)
        if hasattr(module, PLACEHOLDERS) and PLACEHOLDERS not in methods:
            own = getattr(module, FEATURES)
            read: Any = partial(read_images, own)
            read.__signature__ = inspect.signature(own)  # `generate` looks at it.
            methods[FEATURES] = read
            config: Any = module.config
            methods[PLACEHOLDERS] = CheckedOnce(
                getattr(module, PLACEHOLDERS), config.image_token_id
            )
        if hasattr(module, DEEP) and DEEP not in methods:
            methods[DEEP] = partial(add_features, getattr(module, DEEP))


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


@contextmanager
def one_thread() -> Iterator[None]:
    """Run operators on the CPU in this thread alone. They take microseconds for some ten thousand
    patches, but milliseconds if they wait for threads on cores that are busy, as with the threads
    of the one that packs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def moved(device: torch.device, values: Tensor) -> Tensor:
    """Return `values` of the host on a device, with themselves as `host`."""
    result: Any = on_device(values, device).detach()
    result.host = values
    return result


def read_images(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return a model's features of images, which `own` splits into those of each image."""
    named = {name: with_sizes(value) for name, value in kwargs.items()}
    return own(*map(with_sizes, args), **named)


def with_sizes(value: Any) -> Any:
    """Return sizes that are on the host too as `Sizes`, other arguments as they are."""
    if not hasattr(value, "host"):
        return value
    sizes = value.as_subclass(Sizes)
    sizes.host = value.host
    return sizes


class Sizes(Tensor):
    """Sizes of images on a device, with their values on the `host`."""

    host: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = isinstance(args[0], cls)
        if func is Tensor.tolist and known:
            return args[0].host.tolist()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
        if func in (Tensor.prod, Tensor.__floordiv__) and known:
            result = result.as_subclass(cls)
            result.host = func(args[0].host, *args[1:], **kwargs or {})
        return result


class CheckedOnce:
    """A model's `get_placeholder_mask`: the host compares the numbers of tokens and features in the
    first call only, as `own` does, and the device in later ones. `token` stands for images."""

    def __init__(self, own: Callable[..., Any], token: int) -> None:
        self.own = own
        self.token = token
        self.returns_two: bool | None = None
        """Whether `own` also returns a mask of videos; None before the first call."""

    def __call__(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor,
        image_features: Tensor | None = None,
        **videos: Any,
    ) -> Any:
        if input_ids is None or image_features is None or videos or self.returns_two is None:
            masks = self.own(
                input_ids, inputs_embeds=inputs_embeds, image_features=image_features, **videos
            )
            self.returns_two = isinstance(masks, tuple)
            return masks
        mask = input_ids == self.token
        number = image_features.numel() // inputs_embeds.shape[-1]
        torch._assert_async(
            mask.sum() == number,
            "the tokens that stand for images are not as many as their features",
        )
        placeholders = Placeholders.of(mask[..., None], number)
        return (placeholders, None) if self.returns_two else placeholders


VIEWS = {Tensor.__getitem__, Tensor.to}


class Placeholders(Tensor):
    """The mask [B, T, 1] or [B, T] of tokens that stand for images, with their `places` [N] in the
    B * T tokens."""

    places: Tensor

    @classmethod
    def of(cls, mask: Tensor, number: int) -> "Placeholders":
        """Return the mask [B, T, 1] of so many tokens."""
        order = mask[..., 0].flatten().byte().argsort(descending=True, stable=True)
        result = mask.as_subclass(cls)
        result.places = order[:number]
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.masked_scatter and isinstance(args[1], cls):
            row, mask, features = args
            rows, features = row.flatten(0, 1), features.reshape(-1, row.shape[-1])
            return rows.index_copy(0, mask.places, features).view_as(row)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
        if func in VIEWS and isinstance(args[0], cls) and result.shape[:2] == args[0].shape[:2]:
            places, result = args[0].places, result.as_subclass(cls)
            result.places = places
        return result


def add_features(
    own: Callable[..., Tensor], hidden_states: Tensor, mask: Tensor, features: Tensor
) -> Tensor:
    """Return hidden states [B, T, H] with features [N, H] added for the tokens in `mask`."""
    if not isinstance(mask, Placeholders):
        return own(hidden_states, mask, features)
    rows, features = hidden_states.flatten(0, 1), features.to(hidden_states)
    return rows.index_add(0, mask.places, features).view_as(hidden_states)
