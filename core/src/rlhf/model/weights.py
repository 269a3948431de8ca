"""The weights of a model on one device: read from its folder, or made from random numbers."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from rlhf.config.sections import Config
from rlhf.errors import RLHFError
from rlhf.model.task import FORMS, Task, draw_head, label_head, written_class


def random_model(architecture: Any, config: Config, task: Task, dtype: torch.dtype) -> Any:
    """New weights from `train.seed`, drawn on the host in float32: the same for any rank, stage and
    dtype.

    Buffers stay as they are computed: rotary frequencies rounded to 16 bits would be wrong.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        causal = from_config(architecture, config, task, dtype=torch.float32)
    for parameter in causal.parameters():
        parameter.data = parameter.data.to(dtype)
    causal.config.dtype = dtype
    return causal


def pretrained_model(
    architecture: Any, config: Config, task: Task, dtype: torch.dtype, **options: Any
) -> Any:
    """The weights of `model.path`; an error when some of the model's are not there. A language
    model that becomes a classifier gets a new head from `train.seed`; a classifier keeps its own.
    """
    path = resolved(config.model.path)
    placed = [place for place in options.get("device_map", {}).values() if place.type == "cuda"]
    try:
        # transformers draws a missing head from the generators, which are not ours to move.
        with torch.random.fork_rng(devices=placed), quiet():
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
            f"the weights of {path} do not load: {first_line(error)}; check model.path, or set "
            f"model.init to random for new weights"
        ) from error
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise RLHFError(
            f"{path} has {name} of shape {list(found)} where its config.json asks for "
            f"{list(expected)}: weights and config must be of one model"
        )
    # A classifier leaves the vocabulary's head behind.
    left = "" if task == "causal" else "lm_head."
    unused = sorted(key for key in report["unexpected_keys"] if not left or left not in key)
    if unused and os.environ.get("RANK", "0") == "0":
        print(
            f"warning: {path} has {len(unused)} weights that {type(causal).__name__} does not use, "
            f"such as {unused[0]}",
            file=sys.stderr,
        )
    missing = sorted(report["missing_keys"])
    if missing and is_new_head(causal, task, architecture, missing):
        draw_head(causal, config.train.seed)
    elif missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise RLHFError(
            f"{path} has no weights for {missing[0]}{others} of {type(causal).__name__}: "
            f"model.path "
            f"must be a whole causal language model"
        )
    return causal


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' warnings: what is wrong with a model folder is told here."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(before)


def is_new_head(causal: Any, task: Task, architecture: Any, missing: Sequence[str]) -> bool:
    """Whether what is missing is the head that a language model gets when it becomes a
    classifier."""
    found = label_head(causal)
    if found is None or written_class(architecture).endswith(FORMS[task].suffix):
        return False
    name, head = found
    return set(missing) == {f"{name}.{part}" for part, _ in head.named_parameters()}


def from_config(architecture: Any, config: Config, task: Task, *, dtype: torch.dtype) -> Any:
    """A model of this architecture and task without loaded weights."""
    causal = FORMS[task].auto.from_config(
        architecture, dtype=dtype, trust_remote_code=config.model.trust_remote_code
    )
    causal.tie_weights()  # transformers 5.0 leaves that out on the meta device.
    return causal


def resolved(path: str) -> str:
    """The folder behind `demo:base`; any other path as it is."""
    if path == "demo:base":
        from rlhf.demo import base_model_folder

        return str(base_model_folder())
    if not path:
        raise RLHFError("model.path is empty: give the folder or hub name of a model")
    return path


def first_line(error: Exception) -> str:
    """An exception's text for an error of one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # A line that ends with a colon says what the next one is about.
    return " ".join(lines[: 1 + lines[0].endswith(":")]).rstrip(".")
