"""Whether the head of a stored model is its embedding. The weights decide, because checkpoints
exist whose config.json ties weights that differ."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from rlhf.errors import RLHFError, listed


def is_tied(architecture: Any) -> bool:
    """Return whether transformers' config ties weights in a model or a part of it."""
    return any(getattr(part, "tie_word_embeddings", False) for part in _parts(architecture))


def untie(architecture: Any) -> None:
    """Have no weights tied in models of this config."""
    for part in _parts(architecture):
        if getattr(part, "tie_word_embeddings", False):
            part.tie_word_embeddings = False


def _parts(architecture: Any) -> Iterator[Any]:
    """Yield a config and those inside of it, such as that of the text part."""
    yield architecture
    for name in architecture.sub_configs:
        if isinstance(part := getattr(architecture, name, None), PreTrainedConfig):
            yield from _parts(part)


def separate(causal: Any, weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights that are tied in `causal`, which needs no values, although
    `weights` has different values of them. Only those that it has several times are read."""
    aliases: dict[str, list[str]] = defaultdict(list)
    for target, source in causal.all_tied_weights_keys.items():
        aliases[source].append(target)
    stored = stored_names(causal, weights) if aliases else {}
    found = []
    for source, targets in aliases.items():
        first, *others = [name for name in (source, *targets) if name in stored] or [source]
        if any(differ(weights[stored[first]], weights[stored[other]]) for other in others):
            found += [first, *others]
    return found


def stored_names(
    causal: Any, names: Iterable[str], mapping: Sequence[Any] | None = None
) -> dict[str, str]:
    """Return for weights of a model their names in a checkpoint that has `names`, which
    transformers may rename when it loads them, by `mapping` or that of the family."""
    mapping, state = mapping or get_model_conversion_mapping(causal), causal.state_dict()
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    prefix, found = causal.base_model_prefix, {}
    for name in names:
        renamed, _ = rename_source_key(name, renamings, converters, prefix, state)
        found[renamed if renamed in state else name] = name
    return found


def export_as_stored(causal: Any, names: Iterable[str]) -> None:
    """Have the weights of a model that no loader has filled exported as in a checkpoint that has
    `names`. Where a loader has read them, transformers remembers which names it has changed."""
    mapping = get_model_conversion_mapping(causal)
    if stored_names(causal, names, mapping):
        causal._weight_conversions = [each for each in mapping if each.was_used()]


def differ(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors, perhaps of two dtypes, have different shapes or values."""
    dtype = torch.promote_types(one.dtype, other.dtype)
    return one.shape != other.shape or not torch.equal(one.to(dtype), other.to(dtype))


def check_tied(causal: Any, path: str) -> None:
    """Raise RLHFError if weights that the config of a loaded model ties have different values:
    transformers leaves these separate."""
    for target, source in causal.get_expanded_tied_weights_keys(all_submodels=True).items():
        first, second = causal.get_parameter(source), causal.get_parameter(target)
        if first is not second and differ(first, second):
            raise RLHFError(
                f"{path} has {listed([source, target])} with different values although its "
                "config.json ties them; set tie_word_embeddings to false in its config.json"
            )
