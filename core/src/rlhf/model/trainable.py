"""What of a model is trained: adapters, freezing, recomputation."""

import difflib
import fnmatch
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import BitsAndBytesConfig

from rlhf.config.sections import Config
from rlhf.errors import RLHFError
from rlhf.model.kernels.offload import HostInputs
from rlhf.model.task import FORMS, Task, label_head
from rlhf.model.weights import first_line


def prepare_trainable(
    causal: Any, config: Config, task: Task = "causal", *, shape_only: bool = False
) -> nn.Module:
    """The model with adapters, frozen parameters and recomputation as `config` says; peft wraps
    it where there is an adapter. `shape_only` leaves out an adapter's values: for the meta
    device."""
    if config.model.quantize is not None and not shape_only:
        freeze_quantised(causal)
    model = with_adapter(causal, config, task, shape_only=shape_only)
    freeze(model, config.model.freeze)
    if config.model.recompute in ("full", "offload"):
        recompute(causal, offload=config.model.recompute == "offload")
    return model


def with_adapter(causal: Any, config: Config, task: Task, *, shape_only: bool) -> nn.Module:
    """The model under peft, with a new adapter or the one of `model.adapter`; itself without
    either.

    New adapters are drawn on the host from `train.seed`: the same for any rank, stage and device.
    They keep the model's dtype, since ZeRO-3 wants one; the optimizer holds the masters. A
    classifier's head is trained whole and saved with the adapter (peft's `modules_to_save`).
    """
    adapter = config.model.adapter
    if adapter is None and config.lora is None:
        return causal
    with torch.random.fork_rng(devices=[]), quiet_peft():
        torch.manual_seed(config.train.seed)
        if adapter is None:
            settings = lora_settings(causal, config, task)
        else:
            settings = read_adapter(adapter, task)
            if not shape_only:
                return load_adapter(causal, adapter, trained=True)
        try:
            return get_peft_model(causal, settings, autocast_adapter_dtype=False)
        except ValueError as error:
            raise no_such_target(causal, sorted(as_names(settings.target_modules))) from error


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Without the warning that peft asks transformers by a name that has a successor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        yield


def load_adapter(causal: Any, folder: str, *, trained: bool) -> Any:
    """The model under peft with the adapter of a folder, in the model's dtype."""
    if Path(folder).is_dir() and not list(Path(folder).glob("adapter_model.*")):
        raise RLHFError(f"{folder} has no adapter_model.safetensors: give a whole adapter folder")
    try:
        with quiet_peft():
            return PeftModel.from_pretrained(
                causal, folder, is_trainable=trained, autocast_adapter_dtype=False
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # A damaged file may raise anything.
        raise RLHFError(
            f"the adapter {folder} does not load into {type(causal).__name__}: {first_line(error)}"
        ) from error


def lora_settings(causal: Any, config: Config, task: Task = "causal") -> LoraConfig:
    """peft's form of the section `lora`."""
    lora = config.lora
    assert lora is not None
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    if targets == "all-linear" and task != "causal":
        # peft takes a token classifier's head for one of its targets.
        targets = linear_names(causal)
    elif targets != "all-linear":
        targets = as_names(targets)
        head = head_name(causal)
        if head in targets:
            raise RLHFError(
                f"lora.targets names the head {head}, whose adapter would not reach the "
                f"log-probabilities: "
                f"take it out"
            )
        names = [f".{name}" for name, _ in causal.named_modules()]
        unknown = [one for one in targets if not any(n.endswith(f".{one}") for n in names)]
        if unknown or not targets:
            raise no_such_target(causal, unknown)
    return LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type=FORMS[task].peft,
    )


def no_such_target(causal: Any, targets: list[str]) -> RLHFError:
    """The error for names in `lora.targets` that no adapter can stand on."""
    return RLHFError(
        f"lora.targets {', '.join(targets) or '[]'} names no module of {type(causal).__name__}: "
        f"its linear modules are {', '.join(linear_names(causal))}"
    )


def as_names(targets: Any) -> list[str]:
    """Module names of `lora.targets` as a list."""
    return [targets] if isinstance(targets, str) else list(targets or ())


def head_name(causal: Any) -> str:
    """The last part of the output head's module name."""
    found = label_head(causal)
    if found is not None:
        return found[0]
    head = causal.get_output_embeddings()
    return next(name for name, module in causal.named_modules() if module is head).split(".")[-1]


def linear_names(causal: Any) -> list[str]:
    """The last parts of the names of linear modules but the head."""
    kinds = [
        name.split(".")[-1]
        for name, module in causal.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    ]
    return sorted(set(kinds) - {head_name(causal)})


def read_adapter(folder: str, task: Task = "causal") -> PeftConfig:
    """The settings of an adapter folder that was trained for `task`."""
    settings = adapter_settings(folder)
    if settings.task_type not in (None, FORMS[task].peft):
        raise RLHFError(
            f"model.adapter {folder} was trained for {settings.task_type}, and this trainer needs "
            f"{FORMS[task].peft}: name another adapter, or merge it into its base first"
        )
    settings.inference_mode = False
    return settings


def adapter_settings(folder: str) -> PeftConfig:
    """What the adapter_config.json of a folder says."""
    try:
        return PeftConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        raise RLHFError(
            f"{folder} is no adapter folder: it has no readable adapter_config.json"
        ) from error


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Train no parameter whose name matches one of the shell patterns."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matches = fnmatch.filter(named, pattern)
        if not matches:
            near = difflib.get_close_matches(pattern, named, n=3, cutoff=0.0)
            raise RLHFError(
                f"model.freeze pattern {pattern} matches no parameter: near names are "
                f"{', '.join(near)}"
            )
        for name in matches:
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise RLHFError(f"model.freeze {', '.join(patterns)} leaves nothing to train: freeze less")


def freeze_quantised(causal: Any) -> None:
    """Freeze a base held in 4 bits; its adapters come later and are trained."""
    for parameter in causal.parameters():
        parameter.requires_grad_(False)


def recompute(causal: Any, *, offload: bool) -> None:
    """Keep only each layer's input, with `offload` on the host, and compute the layer again in
    backward."""
    # The second name is the first's in transformers before it was renamed.
    enable = getattr(causal, "activation_checkpointing_enable", None)
    (enable or causal.gradient_checkpointing_enable)({"use_reentrant": False})
    if not causal.get_input_embeddings().weight.requires_grad:
        causal.enable_input_require_grads()
    if offload:
        checkpointed = HostInputs()
        for module in causal.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = checkpointed


def four_bits(config: Config, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' settings for an NF4 base (QLoRA, arXiv 2305.14314)."""
    if config.lora is None and config.model.adapter is None:
        raise RLHFError(
            "model.quantize nf4 freezes the whole model: add lora to have something to train"
        )
    if device.type != "cuda":
        raise RLHFError(f"model.quantize nf4 needs a CUDA device and this run is on {device.type}")
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise RLHFError(
            "model.quantize nf4 needs bitsandbytes: pip install 'rlhf-core[quantize]'"
        ) from error
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
