"""LoRA adapters: new ones from `train.seed`, and the adapter folders of peft."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import TrainableTokensWrapper
from peft.utils.constants import EMBEDDING_LAYER_NAMES
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import Tensor, nn

from rlhf.config.sections import LORA_VARIANTS, READ_BASE, Config, ModelConfig
from rlhf.errors import RLHFError, first_line, listed
from rlhf.model.accelerated import compiles, setting
from rlhf.model.parts import output_layer, outside
from rlhf.model.router import routers_of
from rlhf.model.save import without_values
from rlhf.model.stored import ADAPTER_FILES, damaged_file
from rlhf.model.task import FORMS, Task, label_head
from rlhf.model.tying import differ, untie
from rlhf.model.weights import quiet_transformers, warn_of_unused
from rlhf.sharding import is_sharded, whole_shape

KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""peft's initial values of adapters that leave the base as it is. Others, such as pissa and olora,
subtract the adapter's first values from it."""


def with_adapter(causal: Any, config: Config, task: Task) -> nn.Module:
    """Return the model under peft with a new adapter (`lora`) or that of `model.adapter`.

    New adapters are drawn on the host from `train.seed`, so they are the same for any rank, stage
    and device. They have the dtype of the weights that they are for; the optimizer holds the
    master weights. A classifier's head is trained whole and saved with the adapter (peft's
    `modules_to_save`). On the meta device an existing adapter's values are left out.
    """
    adapter = config.model.adapter
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(config.train.seed)
        if adapter is None:
            settings = lora_settings(causal, config, task)
        else:
            settings = read_adapter(adapter, task)
            check_uncompiled(adapter, settings, config.model)
            if causal.device.type != "meta":
                adapted = load_adapter(causal, adapter, trained=True)
                name_base(adapted.active_peft_config, causal, config.model)
                return adapted
            name_base(settings, causal, config.model)
        was_tied = tied_head(causal) is not None
        try:
            model = get_peft_model(causal, settings, autocast_adapter_dtype=False)
        except Exception as error:  # peft refuses some targets of some families.
            kind, reason = type(causal).__name__, first_line(error)
            raise RLHFError(
                f"peft refuses the adapter of {kind} ({reason}); change lora"
                if adapter is None
                else f"cannot put the adapter {adapter} on {kind} ({reason}); merge it into its "
                "base first, or choose another adapter"
            ) from error
        if adapter is not None:
            check_head(adapter, causal, was_tied=was_tied)
        elif was_tied and tied_head(causal) is None:
            raise RLHFError(
                f"{type(causal).__name__} shares one weight between embedding and head, which peft "
                f"would separate; remove {', '.join(settings.modules_to_save or ())} from "
                "lora.modules_to_save"
            )
        return model


def name_base(settings: PeftConfig, causal: Any, model: ModelConfig) -> None:
    """Record the base that an existing adapter is trained on from now on, in place. It may be
    another one than its folder names, or the same one in another place."""
    settings.base_model_name_or_path = causal.name_or_path
    settings.revision = model.revision


def check_head(folder: str, causal: Any, *, was_tied: bool) -> None:
    """Raise RLHFError if an existing adapter changes the logits other than through the hidden
    states and the head's weight, from which losses compute them."""
    head = output_layer(causal)
    if isinstance(head, BaseTunerLayer | TrainableTokensWrapper):
        problem = "adapts the output head, whose adapter would not affect the log-probabilities"
    elif was_tied and tied_head(causal) is None:
        problem = "separates the embedding from the head, although both share one weight"
    else:
        return
    raise RLHFError(f"model.adapter {folder} {problem}; choose another adapter")


def check_uncompiled(folder: str, settings: Any, model: ModelConfig) -> None:
    """Raise RLHFError for an existing adapter that layers cannot be compiled with, as the settings
    of new ones are refused."""
    variant, stacked = base_reader(settings), getattr(settings, "target_parameters", None)
    if (model.fp8 and (variant or stacked)) or (stacked and compiles(model)):
        raise RLHFError(
            f"model.adapter {folder} has {variant or 'adapters of stacked weights'}, which cannot "
            f"be combined with {setting(model)}; remove {setting(model)}"
        )


def base_reader(settings: Any) -> str | None:
    """Return the name of the variant of LoRA that reads the base's weight outside of its forward,
    if it is chosen in peft's settings."""
    chosen = (name for name in READ_BASE if getattr(settings, LORA_VARIANTS[name], None))
    return next(map(READ_BASE.get, chosen), None)


def tied_head(causal: Any) -> nn.Parameter | None:
    """Return the weight that is both input embedding and output head; None if there is none."""
    head = output_layer(causal)
    weight = causal.get_input_embeddings().weight
    return weight if head is not None and head.weight is weight else None


def load_adapter(causal: Any, folder: str, *, trained: bool) -> Any:
    """Return the model under peft with the adapter of a folder, in the model's dtype.

    Raises RLHFError for weights that the folder lacks, and for other values of the base's weights
    if the adapter is `trained`, since an export would not have them.
    """
    if Path(folder).is_dir() and not list(Path(folder).glob("adapter_model.*")):
        raise RLHFError(
            f"{folder} has no adapter_model.safetensors; pass a complete adapter folder"
        )
    missing, unexpected = list[str](), list[str]()

    def note(_: nn.Module, keys: Any) -> None:
        missing.extend(name for name in keys.missing_keys if ".lora_" in name)
        unexpected.extend(keys.unexpected_keys)

    checks = [causal.register_load_state_dict_post_hook(note)]
    if trained:
        check = partial(check_base, folder=folder)
        checks.append(causal.register_load_state_dict_pre_hook(check))
    try:
        with quiet_transformers():
            adapted = PeftModel.from_pretrained(
                causal, folder, is_trainable=trained, autocast_adapter_dtype=False
            )
    except (torch.OutOfMemoryError, RLHFError):
        raise
    except Exception as error:  # A damaged file may raise anything.
        raise damaged_file(folder, ADAPTER_FILES) or RLHFError(
            f"cannot load the adapter {folder} into {type(causal).__name__}: {first_line(error)}"
        ) from error
    finally:
        for each in checks:
            each.remove()
    if missing:
        names = listed([name.replace(".default", "") for name in missing])
        raise RLHFError(
            f"the adapter {folder} has no weights for {names}; pass a complete adapter folder"
        )
    warn_of_unused(folder, causal, unexpected)
    return adapted


def check_base(
    causal: nn.Module, weights: Mapping[str, Tensor], prefix: str, *_: Any, folder: str
) -> None:
    """Raise RLHFError if an adapter that is about to be loaded into the model changes weights of
    its base: peft may save these too, but we export only the adapter."""
    frozen = {prefix + n: p for n, p in causal.named_parameters() if not p.requires_grad}
    both = sorted(frozen.keys() & weights.keys())
    if unknown := [name for name in both if is_sharded(frozen[name])]:
        raise RLHFError(
            f"the adapter {folder} has copies of {listed(unknown)} of its base, which cannot be "
            "compared at ZeRO stage 3; choose stage 2 or lower"
        )
    if changed := [n for n in both if differ(frozen[n], weights[n].to(frozen[n]))]:
        raise RLHFError(
            f"the adapter {folder} has other values of {listed(changed)} than its base, which the "
            "export of an adapter would lose; merge it with rlhf merge and train the merged model"
        )


def merged(adapted: Any) -> Any:
    """Return the base with its adapter merged into its weights. If the adapter changes only one of
    an embedding and the head that share a weight, these become separate."""
    causal = adapted.get_base_model()
    head, embedding = output_layer(causal), causal.get_input_embeddings()
    is_adapted = any(hasattr(module, "base_layer") for module in (head, embedding))
    if is_adapted and tied_head(causal) is not None:
        # The adapter is added in place, and the other module keeps the base's values.
        getattr(head, "base_layer", head).weight = nn.Parameter(head.weight.detach().clone())
    with quiet_transformers():
        whole = adapted.merge_and_unload()
    head, embedding = output_layer(whole), whole.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        untie(whole.config)
        whole.all_tied_weights_keys = {}
    return whole


def lora_settings(causal: Any, config: Config, task: Task = "causal") -> LoraConfig:
    """Return peft's settings for the section `lora`."""
    lora = config.lora
    assert lora is not None
    parts = config.model.train or ("language",)
    targets = target_modules(causal, lora.targets, parts)
    others = excluded_modules(causal, targets, parts, linear=lora.targets == "all-linear")
    check_names(causal, lora)
    return LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        **{theirs: getattr(lora, ours) for ours, theirs in LORA_VARIANTS.items()},
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=others,
        target_parameters=list(lora.parameters) or None,
        modules_to_save=list(lora.modules_to_save) or None,
        ensure_weight_tying=tied_head(causal) is not None
        and any(name in EMBEDDING_LAYER_NAMES for name in lora.modules_to_save),
        task_type=FORMS[task].peft,
        revision=config.model.revision,
    )


def target_modules(
    causal: Any, chosen: str | Sequence[str], parts: Collection[str] = ("language",)
) -> list[str]:
    """Return the names of `lora.targets` in these parts of a model. Raises RLHFError for the head,
    for names that no module of these parts has and for those of modules that peft would not
    adapt."""
    if chosen == "all-linear":
        linear = {name.split(".")[-1] for name in linear_modules(causal, parts)}
        return sorted(linear - taken_for_experts(causal, linear))
    targets = [chosen] if isinstance(chosen, str) else list(chosen)
    if (head := head_name(causal)) in targets:
        raise RLHFError(
            f"lora.targets names the head {head}, whose adapter would not affect the "
            f"log-probabilities; remove {head}"
        )
    left_out, kind = outside(causal, parts), type(causal).__name__
    names = [f".{name}" for name, module in causal.named_modules() if module not in left_out]
    own = f"the trained parts of {kind}" if left_out else kind
    unknown = [one for one in targets if not any(n.endswith(f".{one}") for n in names)]
    if unknown or not targets:
        raise RLHFError(
            f"lora.targets {', '.join(unknown) or '[]'} names no module of {own}; its linear "
            f"modules: {', '.join(target_modules(causal, 'all-linear', parts))}"
        )
    if taken := sorted(taken_for_experts(causal, targets)):
        raise RLHFError(
            f"peft adapts experts or routers of {kind} in place of the modules {listed(taken)} in "
            "lora.targets; remove these, and name the weights of experts in lora.parameters"
        )
    return targets


def taken_for_experts(causal: Any, targets: Iterable[str]) -> set[str]:
    """Return the targets that peft takes for the names that experts and routers had up to
    transformers 4, when they were linear layers. It adapts these instead, at the creation of an
    adapter and when one is opened again, also where the model has modules with the same names."""
    settings = LoraConfig(target_modules=list(targets))
    with suppress(ValueError):  # peft raises it again when it creates the adapter.
        convert_peft_config_for_transformers(settings, causal, None)
    return {*targets}.difference(settings.target_modules or ())


def excluded_modules(
    causal: Any, targets: Sequence[str], parts: Collection[str], *, linear: bool = True
) -> str | None:
    """Return a pattern of the modules that have the name of a target, but are outside of these
    parts or, with `linear`, not among `linear_modules`; None if there are none."""
    kept, left_out = linear_modules(causal, parts), outside(causal, parts)
    others = {
        re.sub(r"\d+", r"\\d+", re.escape(name))
        for name, module in causal.named_modules()
        if any(f".{name}".endswith(f".{target}") for target in targets)
        and (name not in kept if linear else module in left_out)
    }
    return "|".join(sorted(others)) or None


def linear_modules(causal: Any, parts: Collection[str] = ("language",)) -> dict[str, nn.Module]:
    """Return the modules that "all-linear" adapts, by name: the linear layers in these parts of a
    model, except the head and the routers. `language` is what text reaches.

    A family's own kind of linear layer may return something else (the routers of Llama 4, a tuple).
    The fused kernel of a Mamba layer reads the weight of its output projection, past an adapter.
    """
    head = head_name(causal)
    left_out = outside(causal, parts)
    for router, _ in routers_of(causal):
        left_out.update(router.modules())
    for part in causal.modules():
        if {"A_log", "D"} <= {name for name, _ in part.named_parameters(recurse=False)}:
            left_out.add(getattr(part, "out_proj", part))
    return {
        name: module
        for name, module in causal.named_modules()
        if is_linear(module) and module not in left_out and name.split(".")[-1] != head
    }


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes what a linear layer does: a subclass with a forward of its
    own has to return one tensor of the right shape."""
    if not isinstance(module, nn.Linear):
        return type(module).__name__ == "Conv1D"
    kind = type(module)
    if kind.forward is nn.Linear.forward or kind.__module__.startswith("bitsandbytes."):
        return True
    row = torch.empty(1, module.in_features, device="meta")
    try:
        found = torch.func.functional_call(module, without_values(module), (row,))
    except Exception:  # A family's own code may raise anything.
        return False
    return isinstance(found, Tensor) and found.shape == (1, module.out_features)


def check_names(causal: Any, lora: Any) -> None:
    """Raise RLHFError for names in `lora.modules_to_save` that no module of the model has, and in
    `lora.parameters` that no stacked weight has."""
    kind = type(causal).__name__
    modules = dict(causal.named_modules())
    lists = {name for name, module in modules.items() if isinstance(module, nn.ModuleList)}
    wholes = {name.split(".")[-1] for name in modules.keys() - lists}
    for name in lora.modules_to_save:
        if name not in wholes:
            near = difflib.get_close_matches(name, wholes - {""}, n=3, cutoff=0.0)
            raise RLHFError(
                f"lora.modules_to_save {name} names no module of {kind}; similar names: "
                f"{', '.join(near)}"
            )
    stacked = [
        name
        for name, weight in causal.named_parameters()
        if len(whole_shape(weight)) == 3
        and not isinstance(modules[name.rpartition(".")[0]], nn.Conv1d)
    ]
    for name in lora.parameters:
        if not any(f".{one}".endswith(f".{name}") for one in stacked):
            known = ", ".join(sorted({".".join(one.split(".")[-2:]) for one in stacked}))
            raise RLHFError(
                f"lora.parameters {name} names no stacked weight of {kind}; "
                + (f"available: {known}" if known else "it has none, so remove lora.parameters")
            )


def head_name(causal: Any) -> str:
    """Return the last part of the output head's module name."""
    if labels := label_head(causal):
        return labels[0]
    head = output_layer(causal)
    return next(name for name, module in causal.named_modules() if module is head).split(".")[-1]


def read_adapter(folder: str, task: Task = "causal") -> PeftConfig:
    """Return the settings of a LoRA adapter. Raises RLHFError for an adapter of another kind, or
    that was trained for another task."""
    settings = adapter_settings(folder)
    if settings.peft_type != PeftType.LORA:
        raise RLHFError(
            f"model.adapter {folder} is not a LoRA adapter; merge it into its base first, or "
            "choose another adapter"
        )
    if settings.task_type not in (None, FORMS[task].peft):
        raise RLHFError(
            f"model.adapter {folder} was trained for {settings.task_type}, but this trainer needs "
            f"{FORMS[task].peft}; choose another adapter, or merge it into its base first"
        )
    if settings.init_lora_weights not in KEEPS_BASE:
        raise RLHFError(
            f"model.adapter {folder} was initialized by {settings.init_lora_weights}, which may "
            f"have changed the weights of its base; merge it into its base first with rlhf merge, "
            "and set lora to train a new adapter"
        )
    settings.inference_mode = False
    return settings


def adapter_settings(folder: str) -> PeftConfig:
    """Return the settings in the adapter_config.json of a folder."""
    try:
        return PeftConfig.from_pretrained(folder)
    except Exception as error:  # A damaged file may raise anything.
        raise damaged_file(folder, ["adapter_config.json"]) or RLHFError(
            f"{folder} is not an adapter folder: it has no readable adapter_config.json"
        ) from error
