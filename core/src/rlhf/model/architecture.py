"""The architecture of a configured model: transformers' config of its folder, and empty models."""

from contextlib import suppress
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from rlhf.config.sections import Config
from rlhf.config.source_names import (
    DEMO_MODEL,
    check_model_folder,
    check_not_missing,
    local_path,
)
from rlhf.errors import RLHFError, first_line
from rlhf.model.task import FORMS, Task, prepare_architecture, written_class

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def read_architecture(config: Config, task: Task = "causal", labels: int | None = None) -> Any:
    """Return transformers' config of `model.path` with the labels of `task`, or so many `labels`.

    Raises RLHFError for a folder without a readable config, a model that is not a causal language
    model, quantized weights, and a family without a class for the task.
    """
    path = resolved(config.model.path)
    check_model_folder(path)
    try:
        architecture = _saved_config(config)
    except Exception as error:  # A damaged folder may raise anything.
        raise RLHFError(
            f"model.path {path} is neither a folder with a config.json nor a readable model on the "
            f"hub: {first_line(error)}"
        ) from error
    written = written_class(architecture)
    if not FORMS["causal"].supports(architecture) or written.endswith("ForMaskedLM"):
        raise RLHFError(
            f"model.path {path} is {written or architecture.model_type}, not a causal language "
            "model; choose one that transformers opens with AutoModelForCausalLM"
        )
    check_unquantized(architecture, path)
    prepare_architecture(architecture, task, labels, path)
    return architecture


def check_unquantized(architecture: Any, path: str) -> None:
    """Raise RLHFError if the weights of a model are stored in a quantized format."""
    for part in (architecture, architecture.get_text_config(decoder=True)):
        if given := getattr(part, "quantization_config", None):
            method = given.get("quant_method", "bitsandbytes")
            raise RLHFError(
                f"model.path {path} has quantized weights ({method}), which cannot be used here; "
                "choose the model that they were made from, or unpack them once as docs/models.md "
                "shows"
            )


def known_tokens(config: Config) -> int | None:
    """Return the vocabulary size of `model.path`; None if it cannot be read."""
    try:
        return int(_saved_config(config).get_text_config().vocab_size)
    except Exception:  # A damaged folder may raise anything.
        return None


def from_config(architecture: Any, config: Config, task: Task, *, dtype: torch.dtype) -> Any:
    """Return a model of this architecture and task without loaded weights, with the generation
    config of `model.path` as transformers' own loaders read it."""
    causal = FORMS[task].auto.from_config(
        architecture, dtype=dtype, trust_remote_code=config.model.trust_remote_code
    )
    causal.tie_weights()  # transformers 5.0 does not tie on the meta device.
    if causal.can_generate():
        with suppress(OSError):  # Not every folder has one.
            causal.generation_config = GenerationConfig.from_pretrained(
                resolved(config.model.path), revision=config.model.revision
            )
    return causal


def resolved(path: str, setting: str = "model.path") -> str:
    """Return the folder of a model, or its name on the hub. Raises RLHFError for a local path
    that is not a folder."""
    if path == DEMO_MODEL:
        from rlhf.demo import base_model_folder

        return str(base_model_folder())
    if not path:
        raise RLHFError("model.path is empty; pass a model folder or a name on the hub")
    check_not_missing(path, setting)
    folder = local_path(path)
    return str(folder) if folder.is_dir() else path


def _saved_config(config: Config) -> Any:
    model = config.model
    return AutoConfig.from_pretrained(
        resolved(model.path), revision=model.revision, trust_remote_code=model.trust_remote_code
    )
