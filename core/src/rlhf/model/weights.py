"""A model's weights on one device: read from its folder, or drawn at random."""

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import core_model_loading

from rlhf.config.sections import Config
from rlhf.devices import through_pinned_memory
from rlhf.errors import RLHFError, first_line
from rlhf.model.architecture import from_config, resolved
from rlhf.model.task import FORMS, Task, draw_head, label_head, written_class


def random_model(architecture: Any, config: Config, task: Task, dtype: torch.dtype) -> Any:
    """Return a model with new weights from `train.seed`. They are drawn on the host in float32, so
    they are the same for any rank, stage and dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        causal = from_config(architecture, config, task, dtype=torch.float32)
    # Not causal.to(dtype): rotary frequencies, which are buffers, must stay in float32.
    for parameter in causal.parameters():
        parameter.data = parameter.data.to(dtype)
    causal.config.dtype = dtype
    return causal


def pretrained_model(
    architecture: Any, config: Config, task: Task, dtype: torch.dtype, **options: Any
) -> Any:
    """Return the model with the weights of `model.path`.

    Raises RLHFError unless the folder has all of the model's weights. A language model that becomes
    a classifier gets a new head from `train.seed`; a classifier keeps its own.
    """
    path = resolved(config.model.path)
    devices = [place for place in options.get("device_map", {}).values() if place.type != "cpu"]
    kind = devices[0].type if devices else "cpu"
    try:
        # transformers draws a missing head from the global generators, which a run must not move.
        generators = torch.random.fork_rng(devices, device_type=kind)
        with generators, quiet_transformers(), pinned_copies():
            causal, report = FORMS[task].auto.from_pretrained(
                path,
                config=architecture,
                dtype=dtype,
                revision=config.model.revision,
                trust_remote_code=config.model.trust_remote_code,
                weights_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # A damaged file may raise anything.
        raise RLHFError(
            f"cannot load the weights of {path}: {first_line(error)}; check model.path, or set "
            f"model.init to random for new weights"
        ) from error
    if check_loading_report(path, architecture, causal, report, task):
        draw_head(causal, config.train.seed)
    return causal


@contextmanager
def pinned_copies() -> Iterator[None]:
    """Have transformers copy weights to an accelerator through pinned memory, which is faster. A
    version without this function, or whose function takes other arguments, is left unchanged."""
    name = "_materialize_copy"
    own: Any = getattr(core_model_loading, name, None)
    if own is None or [*signature(own).parameters] != ["tensor", "device", "dtype"]:
        yield
        return

    def copy(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        place = torch.device("cpu" if device is None else device)
        if place.type in ("cpu", "meta", "mps"):  # Apple's devices share the host's memory.
            return own(tensor, device, dtype)
        # Indexing reads a tensor from its file.
        return through_pinned_memory(tensor[...], place, dtype)

    setattr(core_model_loading, name, copy)
    try:
        yield
    finally:
        setattr(core_model_loading, name, own)


def check_loading_report(
    path: str, architecture: Any, causal: Any, report: Mapping[str, Any], task: Task
) -> bool:
    """Return whether only a classifier's new head is missing from the folder.

    Raises RLHFError for a weight of another shape and for any other missing weight; warns of
    weights that the model does not use.
    """
    for name, actual, expected in sorted(report["mismatched_keys"]):
        raise RLHFError(
            f"{path} has {name} of shape {list(actual)} where its config.json specifies "
            f"{list(expected)}: weights and config must belong to one model"
        )
    warn_of_unused(path, causal, report["unexpected_keys"], task)
    missing, new_head = sorted(report["missing_keys"]), set[str]()
    labels = label_head(causal)
    if labels is not None and not written_class(architecture).endswith(FORMS[task].suffix):
        # A language model that becomes a classifier.
        new_head = {f"{labels[0]}.{part}" for part, _ in labels[1].named_parameters()}
    if missing and {*missing} != new_head:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise RLHFError(
            f"{path} has no weights for {missing[0]}{others} of {type(causal).__name__}: "
            "model.path must be a complete causal language model"
        )
    return bool(missing)


def warn_of_unused(path: str, causal: Any, unexpected: Iterable[str], task: Task) -> None:
    """Print a warning on rank 0 if a folder has weights that the model does not use."""
    # A classifier does not use the vocabulary's head.
    unused = sorted(key for key in unexpected if task == "causal" or "lm_head." not in key)
    if unused and os.environ.get("RANK", "0") == "0":
        print(
            f"warning: {path} has {len(unused)} weights that {type(causal).__name__} does not use, "
            f"such as {unused[0]}",
            file=sys.stderr,
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' warnings about a model folder and about positions past the model's
    context, since we check both ourselves, and peft's about a name that transformers has
    deprecated."""
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
            yield
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
