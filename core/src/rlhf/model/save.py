"""Model folders that plain transformers or peft opens, and the check that they are complete."""

import copy
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import cached_file

from rlhf.errors import RLHFError, first_line, listed
from rlhf.folder.run_folder import EXTRA_FILE
from rlhf.model.day import without_day
from rlhf.model.dropout import published_config
from rlhf.model.extra import EXTRA_PREFIX
from rlhf.model.parts import has_adapter, unwrapped
from rlhf.model.task import label_head, reads_images
from rlhf.model.tokenizer import end_tokens, with_padding
from rlhf.sharding import whole_shape

PROCESSOR_FILES = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
"""Files of a model that reads images which say how they are prepared."""

SCORED_BY = "rlhf_trainer"
"""Key of an exported config.json: the trainer whose scorer opens the model."""


def save_weights(model: nn.Module, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Write a transformers model in the Hugging Face layout, or only its adapter if it has one.

    `weights` is the full state dict on the host; for a model with an adapter, the adapter's weights
    suffice. transformers' and peft's own writers split merged expert weights again. Each weight is
    written in the dtype that `model` holds it in. At ZeRO-3 `model` has no values, and none are
    read from it.
    """
    own = model.state_dict()
    unknown = sorted(weights.keys() - own.keys())
    assert not unknown, f"{unknown[0]} is not a weight of {type(unwrapped(model)).__name__}"
    state = {name: value.to(own[name].dtype) for name, value in weights.items()}
    causal: Any = model
    with _quiet_deepspeed(), published_config(unwrapped(model)):
        if has_adapter(model):
            # The base is frozen, also where the adapter is on an embedding.
            causal.save_pretrained(str(directory), state_dict=state, save_embedding_layers=False)
        else:
            causal.save_pretrained(directory, state_dict=without_tied(causal, state))


@contextmanager
def _quiet_deepspeed() -> Iterator[None]:
    """Hide what DeepSpeed logs if it is installed: accelerate imports it to save a model."""
    logger = logging.getLogger("DeepSpeed")
    logger.addFilter(_is_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def without_tied(causal: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict in which a tied weight has only the name that transformers reads."""
    tied: Mapping[str, str] = causal.all_tied_weights_keys
    return {
        name: value
        for name, value in state.items()
        if tied.get(name, name) not in state or name not in tied
    }


def save_tokenizer_and_config(
    model: nn.Module, tokenizer: Any, directory: Path, more: Mapping[str, Any] | None = None
) -> None:
    """Write the tokenizer with its chat template, and the files that say how to use the weights.

    For a language model that is the generation config, whose EOS ends the trained turn (`rlhf
    merge` copies it). A classifier's config.json names a padding token that ends no answer:
    transformers scores the last token that is not padding. `more` goes into config.json.
    """
    causal = unwrapped(model)
    classifies = label_head(causal) is not None
    if classifies:
        text = causal.config.get_text_config()
        tokenizer = with_padding(tokenizer, text.vocab_size)
        text.pad_token_id = tokenizer.pad_token_id
    if reads_images(causal.config):
        copy_processor(causal.config, directory)
    written = copy.copy(tokenizer)
    written.chat_template = without_day(tokenizer.chat_template)
    written.save_pretrained(directory)
    for name, value in (more or {}).items():
        setattr(causal.config, name, value)
    if classifies or more:
        causal.config.architectures = [type(causal).__name__]
        with published_config(causal):
            causal.config.save_pretrained(directory)
    if classifies:
        return
    generation = GenerationConfig.from_dict(causal.generation_config.to_dict())
    if ends := end_tokens(tokenizer):
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    if tokenizer.pad_token_id is not None:
        generation.pad_token_id = tokenizer.pad_token_id
    # `save_pretrained` would refuse sampling values without `do_sample`, which models publish.
    generation.to_json_file(directory / "generation_config.json")


def copy_processor(architecture: Any, directory: Path) -> None:
    """Copy the files of a base that say how its images are prepared."""
    for name in PROCESSOR_FILES:
        found = cached_file(
            architecture._name_or_path, name, revision=getattr(architecture, "_commit_hash", None),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )  # fmt: skip
        if found is not None:
            shutil.copyfile(found, directory / name)


def verify_export(
    directory: Path, model: nn.Module, extra: Mapping[str, Tensor] | None = None
) -> None:
    """Open the safetensors files in `directory` again and compare names and shapes with those of
    the model and of the trainer's own parameters `extra`; at ZeRO-3 these are the shapes before
    sharding.

    Raises RLHFError for a file that does not open, and for a weight that is missing, unexpected or
    of another shape.
    """
    written = written_shapes(directory)
    expected = exported_shapes(model)
    if extra:
        written |= written_shapes((directory / EXTRA_FILE).parent)
        expected |= {name: tuple(whole_shape(value)) for name, value in extra.items()}
    for name in sorted(expected.keys() | written.keys()):
        if name not in written:
            problem = f"{name} is missing (expected shape {list(expected[name])})"
        elif name not in expected:
            problem = f"{name} of shape {list(written[name])} does not belong to the model"
        elif written[name] != expected[name]:
            problem = f"{name} has shape {list(written[name])}, expected {list(expected[name])}"
        else:
            continue
        raise RLHFError(f"the export in {directory} is incomplete: {problem}")


def written_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor in the safetensors files of a folder."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 (no mapping)
                    shapes[name] = tuple(weights.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise RLHFError(f"cannot read the exported file {file}: {error}") from error
    return shapes


def exported_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of an export, as the writers rename them."""
    exported = exported_state(model, without_values(model))
    return {name: tuple(value.shape) for name, value in exported.items()}


def without_values(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole state dict on the meta device."""
    return {
        name: torch.empty(tuple(whole_shape(value)), device="meta")
        for name, value in model.state_dict(keep_vars=True).items()
    }


def exported_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what `save_weights` writes of a state dict, by the names that it writes."""
    if has_adapter(model):
        from peft.utils import get_peft_model_state_dict  # late: start-up time

        return get_peft_model_state_dict(model, state_dict=dict(state), save_embedding_layers=False)
    causal = unwrapped(model)
    kept = without_tied(causal, state)
    for name in causal._keys_to_ignore_on_save or ():
        kept.pop(name, None)
    return revert_weight_conversion(causal, kept)


def exported_names(module: nn.Module) -> list[str]:
    """Return the names of the weights and buffers that an export needs, a tied weight once. With an
    adapter of peft's these are what is trained, and of the frozen weights those that peft added."""
    parameters = dict(module.named_parameters())
    if any(hasattr(part, "peft_config") for part in module.modules()):
        return [name for name, value in parameters.items() if of_adapter(name, value)]
    kept = module.state_dict(keep_vars=True)
    return [*parameters, *(name for name, _ in module.named_buffers() if name in kept)]


def buckets_of(module: nn.Module, size: int) -> Iterator[list[str]]:
    """Yield the names of what an export needs, in buckets of at most `size` bytes or one weight."""
    state, bucket, room = module.state_dict(keep_vars=True), list[str](), size
    for name in exported_names(module):
        needed = whole_shape(state[name]).numel() * state[name].element_size()
        if bucket and needed > room:
            yield bucket
            bucket, room = [], size
        bucket.append(name)
        room -= needed
    if bucket:
        yield bucket


def exported_bucket(model: nn.Module, bucket: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return some of the weights of a transformers model, a tied one once, by the names that an
    export gives them."""
    tied: Mapping[str, str] = {} if has_adapter(model) else unwrapped(model).all_tied_weights_keys
    return exported_state(model, {tied.get(name, name): value for name, value in bucket.items()})


def of_adapter(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter beside an adapter is trained, the trainer's own, or of peft."""
    return parameter.requires_grad or "default" in name.split(".") or name.startswith(EXTRA_PREFIX)


def check_exportable(model: nn.Module) -> None:
    """Raise RLHFError if the export would fail at the end of training. `model` needs no values."""
    kind, state = type(unwrapped(model)).__name__, without_values(model)
    try:
        expected = exported_state(model, state)
    except Exception as error:  # A family's own conversion may raise anything.
        raise RLHFError(
            f"{kind} cannot be trained, because its weights cannot be written: {first_line(error)}"
        ) from error
    if not has_adapter(model):
        return
    adapter = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if of_adapter(name, parameter)
    }
    written = exported_state(model, {name: state[name] for name in adapter})
    sources = {id(state[name]): parameter for name, parameter in adapter.items()}
    kept = {sources.get(id(value)) for value in written.values()}
    lost = {name for name, parameter in adapter.items() if parameter not in kept}
    if wrong := sorted(lost | (expected.keys() - written.keys())):
        raise RLHFError(
            f"the adapter of {kind} cannot be exported, because peft does not write "
            f"{listed(wrong)}; change lora, or choose another model.adapter"
        )
    from peft.utils import set_peft_model_state_dict  # late: start-up time

    # A family's own conversion may rename what peft reads.
    missing = set_peft_model_state_dict(model, dict(written)).missing_keys
    if wrong := sorted(adapter.keys() & set(missing)):
        raise RLHFError(
            f"the adapter of {kind} could not be opened again, because peft does not read "
            f"{listed(wrong)} from its file; leave these out of lora.targets"
        )
