"""A model's weights on one device: read from its folder, or drawn at random."""

import os
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
import transformers

from rlhf.config.sections import Config
from rlhf.errors import RLHFError, counted, first_line, listed
from rlhf.model.accelerated import installed_kernels
from rlhf.model.architecture import from_config, resolved
from rlhf.model.stored import WEIGHTS, damaged_file, model_folder, stored_weights
from rlhf.model.task import (
    FORMS,
    Task,
    auto_class,
    draw_head,
    head_weights,
    label_head,
    written_class,
)
from rlhf.model.tying import check_tied, stored_names

OWN_CHECKS = (
    ".*is_gradient_checkpointing", ".*tie_word_embeddings", "Found missing adapter keys.*\\.lora_",
)  # fmt: skip
"""What peft warns of: a deprecated name, an adapter on tied weights, weights that one lacks."""


def random_model(architecture: Any, config: Config, task: Task, dtype: torch.dtype) -> Any:
    """Return a model with new weights from `train.seed`. They are drawn on the host in float32, so
    they are the same for any rank, stage and dtype."""
    with torch.random.fork_rng(devices=[]):
        with torch.device("meta"):
            empty = from_config(architecture, config, task, dtype=dtype)
        torch.manual_seed(config.train.seed)
        causal = from_config(architecture, config, task, dtype=torch.float32)
    # Not causal.to(dtype): rotary frequencies, which are buffers, must stay in float32.
    for parameter, other in zip(causal.parameters(), empty.parameters(), strict=True):
        parameter.data = parameter.data.to(other.dtype)
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
    kernels = installed_kernels()
    try:
        # transformers draws a missing head from the global generators, which a run must not move.
        generators = torch.random.fork_rng(devices, device_type=kind)
        with generators, quiet_transformers(), kernels.loading() if kernels else nullcontext():
            auto = auto_class(architecture, task, config.model.part)
            causal, report = auto.from_pretrained(
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
        folder = model_folder(path, config.model.revision) or path
        raise damaged_file(folder, WEIGHTS) or RLHFError(
            f"cannot load the weights of {path}: {first_line(error)}; check model.path, or set "
            f"model.init to random for new weights"
        ) from error
    check_tied(causal, path)
    report["unexpected_keys"].update(unread_weights(causal, path, config.model.revision))
    if check_loading_report(path, architecture, causal, report, task):
        draw_head(causal, config.train.seed)
    return causal


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
    warn_of_unused(path, causal, report["unexpected_keys"])
    missing = sorted(report["missing_keys"])
    # A language model becomes a classifier with a new head.
    is_classifier = written_class(architecture).endswith(FORMS[task].suffix)
    if missing and {*missing} != (set() if is_classifier else head_weights(causal)):
        raise RLHFError(
            f"{path} has no weights for {listed(missing)} of {type(causal).__name__}: "
            "model.path must be a complete causal language model"
        )
    return bool(missing)


def unread_weights(causal: Any, path: str, revision: str | None) -> list[str]:
    """Return which weights of a model folder or a model on the hub, among those that its family has
    transformers ignore, belong to parts that the model does not have, such as a vision tower or
    layers that predict further tokens. A part with a single tensor is a buffer that older versions
    stored."""
    patterns = [re.compile(each) for each in causal._keys_to_ignore_on_load_unexpected or ()]
    names = stored_weights(path, revision) if patterns else ()
    ignored = [name for name in names if any(pattern.search(name) for pattern in patterns)]
    if not ignored:
        return []
    state, parts = causal.state_dict(), {name for name, _ in causal.named_modules()}
    lacked = defaultdict(list)
    for name, stored in stored_names(causal, ignored).items():
        modules = accumulate(name.split(".")[:-1], "{}.{}".format)
        outermost = next((module for module in modules if module not in parts), None)
        if name not in state and outermost:
            lacked[outermost].append(stored)
    return [name for group in lacked.values() if len(group) > 1 for name in group]


def warn_of_unused(path: str, causal: Any, unexpected: Iterable[str]) -> None:
    """Print a warning on rank 0 if a folder has weights that the model does not use."""
    # A classifier does not use the vocabulary's head.
    is_causal = label_head(causal) is None
    names = sorted(name for name in unexpected if is_causal or "lm_head." not in name)
    if names and os.environ.get("RANK", "0") == "0":
        print(
            f"warning: {path} has {counted(len(names), 'weight')} that {type(causal).__name__} "
            f"does not use: {listed(names)}",
            file=sys.stderr,
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' warnings about a model folder and about positions past the model's
    context, and peft's in OWN_CHECKS, since we check them ourselves."""
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            for text in OWN_CHECKS:
                warnings.filterwarnings("ignore", message=text)
            yield
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
