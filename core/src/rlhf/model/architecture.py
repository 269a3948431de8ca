"""The architecture of a configured model: transformers' config of its folder, and empty models."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from rlhf.config.sections import Config, ModelConfig
from rlhf.config.source_names import DEMO, check_model_folder, check_not_missing, local_path
from rlhf.errors import RLHFError, first_line, listed
from rlhf.model.parts import decoder, output_layer
from rlhf.model.stored import damaged_file, model_files, stored_weights
from rlhf.model.task import (
    FORMS,
    Task,
    auto_class,
    has_text_class,
    label_head,
    prepare_architecture,
    reads_images,
    written_class,
)
from rlhf.model.tying import export_as_stored, is_tied, separate, untie
from rlhf.registry.imports import demo_plugin

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def read_architecture(
    config: Config,
    task: Task = "causal",
    labels: int | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> Any:
    """Return transformers' config of `model.path` with the labels of `task`, or so many `labels`.

    It ties weights only if `weights` agree, by default those of `model.path`.

    Raises RLHFError for a folder without a readable config, a model that is not a causal language
    model, quantized weights, and a family without a class for the task.
    """
    model, path = config.model, resolved(config.model.path)
    check_model_folder(path)
    architecture = saved_config(model)
    written, whole = written_class(architecture), reads_images(architecture)
    check_part(config, architecture, path)
    if not (whole or FORMS["causal"].supports(architecture)) or written.endswith("ForMaskedLM"):
        raise RLHFError(
            f"model.path {path} is {written or architecture.model_type}, not a causal language "
            "model; choose one that transformers opens with AutoModelForCausalLM"
        )
    check_unquantized(architecture, path)
    prepare_architecture(architecture, task, labels, path)
    if model.init != "random":
        settle_tying(architecture, model, task, weights)
    return architecture


def check_part(config: Config, architecture: Any, path: str) -> None:
    """Raise RLHFError if `model.part` text cannot be had, or would have no effect."""
    if config.model.part == "whole":
        return
    if not has_text_class(architecture):
        raise RLHFError(
            f"model.part text needs a model that also reads images, with a class of its own for "
            f"text, which {path} is not; remove model.part"
        )
    if config.lora is not None or config.model.adapter is not None:
        raise RLHFError(
            "model.part text cannot be combined with an adapter, whose base is the whole model; "
            "remove model.part"
        )


def saved_config(model: ModelConfig) -> Any:
    """Return transformers' config of `model.path`. Raises RLHFError if it cannot be read."""
    path = resolved(model.path)
    try:
        options = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
        architecture = config_in(path, **options)
        architecture.get_text_config(decoder=True).to_dict()
    except Exception as error:  # A damaged folder may raise anything.
        raise damaged_file(path, ["config.json"]) or unreadable_config(path, error) from error
    return architecture


def config_in(path: Path | str, **options: Any) -> Any:
    """Return transformers' config of a folder or of a model on the hub, without the attention that
    it names: that may need a library that is not here, and we have our own."""
    # Without this option transformers asks on the terminal, and waits for the answer.
    architecture = AutoConfig.from_pretrained(path, **{"trust_remote_code": False, **options})
    architecture._attn_implementation = None
    return architecture


def unreadable_config(path: str, error: Exception) -> RLHFError:
    """Return the error for a folder or a name on the hub without a readable config."""
    if needs_code(error):
        return untrusted(f"model.path {path}")
    if (Path(path) / "config.json").is_file():
        # Only the key is the text of a KeyError.
        kind = "KeyError: " if isinstance(error, KeyError) else ""
        return RLHFError(
            f"{path}/config.json describes no model that transformers can open "
            f"({kind}{first_line(error)}); correct it, or choose another model.path"
        )
    return RLHFError(
        f"model.path {path} is neither a folder with a config.json nor a readable model on the "
        f"hub: {first_line(error)}"
    )


def needs_code(error: Exception) -> bool:
    """Return whether transformers has refused to run the Python code of a model or a tokenizer."""
    return "trust_remote_code=True" in str(error)


def untrusted(name: str) -> RLHFError:
    """Return the error for what has Python code of its own, without the user's permission."""
    return RLHFError(
        f"{name} needs Python code that comes with it; read that code, and set "
        "model.trust_remote_code to true to run it"
    )


def settle_tying(
    architecture: Any, model: ModelConfig, task: Task, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Untie in `architecture` what config.json ties although `weights`, by default those of
    `model.path`, have different values of it."""
    if not is_tied(architecture):
        return
    if weights is None:
        files = model_files(resolved(model.path), model.revision)
        known = tuple((file, file.stat().st_mtime_ns) for file in files if file.exists())
        found = _separate_in_files(model, task, known)
    else:
        found = _separate(model, task, weights)
    if found:
        untie(architecture)


@lru_cache
def _separate_in_files(
    model: ModelConfig, task: Task, files: tuple[tuple[Path, int], ...]
) -> Sequence[str]:
    """Compare stored weights. A later call only compares names and times of `files`."""
    path = resolved(model.path)
    found = _separate(model, task, stored_weights(path, model.revision))
    if found and os.environ.get("RANK", "0") == "0":
        print(
            f"warning: {path} has {listed(found)} with different values although its config.json "
            "ties them; they are separate weights here and in what is exported",
            file=sys.stderr,
        )
    return found


def _separate(model: ModelConfig, task: Task, weights: Mapping[str, Tensor]) -> Sequence[str]:
    with torch.device("meta"):
        causal = _unfilled(saved_config(model), model, task, torch.float32)
    return separate(causal, weights)


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
        return int(saved_config(config.model).get_text_config().vocab_size)
    except Exception:  # A damaged folder may raise anything.
        return None


def from_config(architecture: Any, config: Config, task: Task, *, dtype: torch.dtype) -> Any:
    """Return a model of this architecture and task without loaded weights, with the dtypes, the
    names in exports and the generation config of `model.path` as transformers' own loaders read
    it."""
    causal = _unfilled(architecture, config.model, task, dtype)
    path, revision = resolved(config.model.path), config.model.revision
    keep_fp32(causal, dtype)
    export_as_stored(causal, stored_weights(path, revision))
    if causal.can_generate():
        try:
            causal.generation_config = GenerationConfig.from_pretrained(path, revision=revision)
        except OSError as error:  # Not every folder has one.
            if damaged := damaged_file(path, ["generation_config.json"]):
                raise damaged from error
        except (ValueError, TypeError) as error:
            raise RLHFError(
                f"{path}/generation_config.json cannot be read ({first_line(error)}); correct it"
            ) from error
    return causal


def keep_fp32(causal: Any, dtype: torch.dtype) -> None:
    """Give weights float32 that transformers' loader leaves in it where it gives others `dtype`,
    such as routers. Those that a family creates in float32 have it already."""
    kept = "|".join(name.replace("*", ".*") for name in causal._get_dtype_plan(dtype))
    for name, parameter in causal.named_parameters():
        if kept and re.search(kept, name):
            parameter.data = parameter.data.float()


def _unfilled(architecture: Any, model: ModelConfig, task: Task, dtype: torch.dtype) -> Any:
    """Return a model of this architecture without loaded weights. Raises RLHFError for a config
    that transformers reads but cannot follow."""
    try:
        causal = auto_class(architecture, task, model.part).from_config(
            architecture, dtype=dtype, trust_remote_code=model.trust_remote_code
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # A damaged config may raise anything.
        raise unreadable_config(resolved(model.path), error) from error
    check_writes_text(causal, model)
    return causal


def check_writes_text(causal: Any, model: ModelConfig) -> None:
    """Raise RLHFError for a model that also reads images in which no decoder with a head of its own
    writes the text."""
    if not reads_images(causal.config):
        return
    try:
        head = label_head(causal) or output_layer(causal)
        found = head is not None and decoder(causal) is not None
    except (AttributeError, NotImplementedError, StopIteration, RecursionError):
        found = False  # The class is not built as transformers' language models are.
    if not found or causal.config.is_encoder_decoder:
        raise RLHFError(
            f"model.path {model.path} is {type(causal).__name__}, which has no decoder and head "
            "for text alone; choose a model with a causal language model in it"
        )


def resolved(path: str, setting: str = "model.path") -> str:
    """Return the folder of a model, or its name on the hub. Raises RLHFError for a local path
    that is not a folder."""
    if path.startswith(DEMO):
        return str(demo_plugin(path).model_folder())
    if not path:
        raise RLHFError("model.path is empty; pass a model folder or a name on the hub")
    check_not_missing(path, setting)
    folder = local_path(path)
    return str(folder) if folder.is_dir() else path
