"""Converts the keys of another project into our settings, and lists those without a counterpart."""

import json
import math
import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from rlhf.errors import RLHFError, counted
from rlhf_migrate.arguments import Arguments, located, parse
from rlhf_migrate.datasets import READERS, listed, names_in
from rlhf_migrate.foreign import PROJECTS, Rule
from rlhf_migrate.rules import Migration, apply, number_of, short

EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
READ = (
    "zero_optimization", "stage", "offload_optimizer", "offload_param", "zero_hpz_partition_size",
    "tensor_parallel", "sequence_parallel_size",
)  # fmt: skip
"""Keys of DeepSpeed's JSON that are translated."""
VARIABLE = re.compile(r"\$[\w{(]")
"""The beginning of a variable of a shell, or of a command in its place."""


def translate(arguments: Arguments, *, folder: Path, devices: int | None = None) -> Migration:
    """Return our settings for what a file of another project sets. `devices` is the number that it
    was run on; paths in it are relative to `folder` or to the working directory."""
    project = PROJECTS[arguments.project]
    variant = project.variants[arguments.variant]
    rules = {**project.keys, **variant.keys}
    written = {key: _plain(value) for key, value in arguments.keys.items()}
    default = {**project.defaults, **variant.defaults}
    keys = default | {
        key: value
        for key, value in written.items()
        if value is not None or not project.empty_is_default
    }
    migration = Migration(variant.trainer, f"{project.title}'s {arguments.variant}")
    for key in [key for key, value in keys.items() if value is None]:
        del keys[key]
        if key in default and rules[key].kind == "set":
            migration.notes[f"{key} null"] = f"the default of {rules[key].ours} is used here"
    _leave_out_variables(migration, keys)
    for name, value in variant.settings.items():
        migration.set(name, value, migration.title)
    # Defaults first: another key of the file may set the same setting.
    for key, rule in sorted(rules.items(), key=lambda item: written.get(item[0]) is not None):
        if key in keys:
            origin = key if key in written else f"default of {project.title}"
            apply(migration, key, keys[key], rule, origin)
    others = {key for each in project.variants.values() for key in each.keys} - rules.keys()
    migration.unneeded.extend(key for key in written if key in others)
    migration.unknown.extend(key for key in written if key not in rules and key not in others)
    _batch(migration, devices or arguments.devices, rules)
    _optimizer(migration, keys)
    _length(migration)
    _lora(migration)
    _losses(migration, keys)
    _stages(migration, keys, folder)
    _data(migration, arguments, keys, folder)
    return migration


def _plain(value: Any) -> Any:
    """Return a number with an exponent in place of its text, which is how YAML 1.1 reads 1e-5, the
    text in place of a date, and None in place of the text that Python's command lines have for
    it."""
    if value == "None":
        return None
    if isinstance(value, date):
        return str(value)
    if isinstance(value, str) and EXPONENT.fullmatch(value) and math.isfinite(float(value)):
        return float(value)
    return value


def _leave_out_variables(migration: Migration, keys: dict[str, Any]) -> None:
    """Remove the keys whose value is a variable of the shell that the file does not set."""
    for key in [key for key, value in keys.items() if VARIABLE.search(str(value))]:
        value = short(keys.pop(key))
        migration.incomplete[key] = f"{value} has no value in the file; write the value"


def _batch(migration: Migration, devices: int | None, rules: Mapping[str, Rule]) -> None:
    """Set `batch.size` to the product of the factors and the devices, if all are known."""
    unknown = [key for key in migration.incomplete if key in rules and rules[key].kind == "factor"]
    if unknown or not migration.factors:
        return
    size = math.prod(migration.factors.values()) * (devices or 1)
    words = [f"{name} {value}" for name, value in migration.factors.items()]
    words.append(counted(devices or 1, "device"))
    migration.set("batch.size", size, " x ".join(words))
    if devices is None:
        migration.notes["batch.size"] = (
            f"{' x '.join(words)}; pass --gpus N if it was run on more devices"
        )


def _optimizer(migration: Migration, keys: Mapping[str, Any]) -> None:
    """Translate the final learning rate, which only some schedules have."""
    options = keys.get("lr_scheduler_kwargs") or {}
    if isinstance(options, str):
        options = parse(options)
    if not isinstance(options, Mapping):
        raise RLHFError(
            f"lr_scheduler_kwargs is {options!r}; write a mapping such as {{min_lr: 1.0e-6}}"
        )
    if "min_lr_rate" in options:
        migration.set("optim.min_lr", options["min_lr_rate"], "lr_scheduler_kwargs")
    elif "min_lr" in options:
        rate = number_of("the learning rate", migration.settings.get("optim.lr"))
        share = number_of("min_lr", options["min_lr"]) / rate
        migration.set("optim.min_lr", share, "lr_scheduler_kwargs: min_lr / learning rate")
    name = str(keys.get("lr_scheduler_type", keys.get("lr_scheduler")))
    has_minimum = "min_lr" in name or "cosine_min_lr_ratio" in keys
    if "optim.min_lr" in migration.settings and not has_minimum:
        migration.drop("optim.min_lr")


def _length(migration: Migration) -> None:
    """Translate the length of the run, in which steps have precedence, and distances in steps."""
    if "train.steps" in migration.settings:
        migration.drop("train.epochs")
    if "train.epochs" in migration.settings:
        epochs = number_of(migration.origins["train.epochs"], migration.settings["train.epochs"])
        migration.settings["train.epochs"] = epochs if epochs % 1 else int(epochs)
    for name, per in (
        ("train.log_every", "logging_steps"),
        ("train.eval_every", "eval_steps"),
        ("checkpoint.every", "save_steps"),
    ):
        if name not in migration.settings:
            continue
        value = number_of(migration.origins[name], migration.settings[name])
        if value == -1:
            migration.settings[name] = None
        elif 0 < value < 1:
            migration.drop(name)
            migration.notes[f"{per} {value:g}"] = f"a share of the run; set {name} to steps"
        elif value % 1 == 0:
            migration.settings[name] = int(value)


def _lora(migration: Migration) -> None:
    """Keep the section `lora` only if an adapter is trained that does not exist yet."""
    settings = migration.settings
    switch = migration.drop("lora") if "lora" in settings else "lora.rank" in settings
    names = [name for name in settings if name.startswith("lora.")]
    if not switch or "model.adapter" in settings:
        for name in names:
            migration.drop(name)
        if not switch:
            migration.drop("model.quantize")
        return
    for name in ("lora.targets", "lora.modules_to_save"):
        value = settings.get(name)
        if isinstance(value, str) and ("," in value or name == "lora.modules_to_save"):
            settings[name] = listed(value)
    if settings.get("lora.targets") is None:
        note = "peft chooses by the model's family, for Llama and Qwen q_proj and v_proj"
        migration.notes["lora.targets"] = note
        migration.set("lora.targets", ["q_proj", "v_proj"], "default of peft")


def _losses(migration: Migration, keys: Mapping[str, Any]) -> None:
    """Translate the settings of a loss that are composed of several keys."""
    if migration.trainer == "kd":
        _distillation(migration, keys)
    if migration.trainer != "dpo":
        return
    names = listed(migration.settings.get("dpo.loss"))
    theirs = names_in(keys.get("loss_type", keys.get("dpo_loss_type", names)))
    weights = keys.get("loss_weights", keys.get("dpo_loss_weights", [1.0] * len(theirs)))
    weight_of = dict(zip(theirs, listed(weights), strict=False))
    losses = {name: weight_of.get(name, 1.0) for name in names}
    sft = migration.drop("dpo.sft")
    if sft or (sft == 0 and "cpo" in losses):
        losses["sft"] = sft
    if "simpo" not in losses:
        migration.drop("dpo.gamma")
    entries = [
        name if each == 1 else {"name": name, "weight": each} for name, each in losses.items()
    ]
    if names:
        migration.settings["dpo.loss"] = entries[0] if len(entries) == 1 else entries
    if keys.get("sync_ref_model"):
        every, mix = keys.get("ref_model_sync_steps", 512), keys.get("ref_model_mixup_alpha", 0.6)
        migration.set("dpo.reference_every", every, "ref_model_sync_steps")
        migration.set("dpo.reference_mix", mix, "ref_model_mixup_alpha")


def _distillation(migration: Migration, keys: Mapping[str, Any]) -> None:
    """Translate GKD's divergence and OpenRLHF's share of it."""
    settings = migration.settings
    if "kd_coef" in keys:
        share = 1 - number_of("kd_coef", keys["kd_coef"])
        migration.set("kd.sft", round(share, 6), "1 - kd_coef")
    if settings.get("kd.beta") in (0, 1):
        settings["kd.loss"] = "reverse_kl" if migration.drop("kd.beta") else "forward_kl"
    if not settings.get("kd.on_policy") and not settings.get("kd.teacher_answers"):
        migration.drop("kd.max_new_tokens")
        migration.drop("kd.sampling_temperature")


def _stages(migration: Migration, keys: Mapping[str, Any], folder: Path) -> None:
    """Take the ZeRO stage, offload and the sizes of groups from DeepSpeed's JSON."""
    content = _deepspeed(migration, keys.get("deepspeed"), folder)
    zero, tensor = (
        each if isinstance(each := content.get(name), Mapping) else {}
        for name in ("zero_optimization", "tensor_parallel")
    )
    for name, size in (
        ("hpz_partition_size", zero.get("zero_hpz_partition_size")),
        ("tensor_parallel", tensor.get("autotp_size")),
        ("sequence_parallel", content.get("sequence_parallel_size")),
    ):
        if isinstance(size, int) and size > 1:
            migration.set(f"deepspeed.{name}", size, "deepspeed")
    _left_out(migration, content, zero)
    if "stage" in zero:
        migration.set("deepspeed.stage", zero["stage"], "deepspeed")
    for name in ("offload_optimizer", "offload_param"):
        offload = zero.get(name) or {}
        if offload.get("device") in ("cpu", "nvme"):
            migration.set(f"deepspeed.{name}", True, "deepspeed")
        if offload.get("device") != "nvme":
            continue
        if "deepspeed.offload_optimizer" not in migration.settings:
            note = "the weights stay in memory; nvme_path needs offload_optimizer"
            migration.notes[f"deepspeed {name}"] = note
        elif "nvme_path" in offload:
            migration.set("deepspeed.nvme_path", offload["nvme_path"], "deepspeed")
            states = zero["offload_optimizer"]
            if any(offload[key] != states.get(key) for key in ("device", "nvme_path")):
                both = "nvme_path has all that is offloaded, the optimizer's states too"
                migration.notes[f"deepspeed {name}"] = both
        else:
            migration.notes[f"deepspeed {name}"] = "set deepspeed.nvme_path to a folder"
    optimizer = zero.get("offload_optimizer") or {}
    # DeepSpeed reads it at this stage only.
    ratio = number_of("ratio", optimizer.get("ratio", 1)) if zero.get("stage") == 3 else 1
    if optimizer.get("device") == "cpu" and 0 < ratio < 1:
        migration.set("deepspeed.offload_ratio", ratio, "deepspeed")
    # At other stages, the other projects ignore it.
    if migration.settings.get("deepspeed.stage") != 3:
        migration.drop("deepspeed.hpz_partition_size")


def _left_out(migration: Migration, content: Mapping[str, Any], zero: Mapping[str, Any]) -> None:
    """List the keys of DeepSpeed's JSON that are not read."""
    for key, value in {**content, **zero}.items():
        if key == "scheduler" or (key == "optimizer" and not _is_adam_by_arguments(value)):
            migration.lost[f"deepspeed {key}"] = "set it in optim"
        elif key.startswith("zero_quantized") and value:
            migration.lost[f"deepspeed {key}"] = "what ranks exchange is not rounded here"
        elif key not in READ:
            migration.unneeded.append(f"deepspeed {key}")


def _is_adam_by_arguments(optimizer: Any) -> bool:
    """Return whether an optimizer in DeepSpeed's JSON is Adam with the settings of the trainer's
    arguments, which transformers puts in place of `auto`."""
    if not isinstance(optimizer, Mapping):
        return optimizer is None
    parameters = optimizer.get("params") or {}
    name = str(optimizer.get("type")).lower()
    return name in ("adam", "adamw") and all(each == "auto" for each in parameters.values())


def _deepspeed(migration: Migration, chosen: Any, folder: Path) -> Any:
    """Return the content of `chosen`, DeepSpeed's JSON or its path; empty if there is none."""
    if not chosen or isinstance(chosen, Mapping):
        return chosen or {}
    file = located(str(chosen), folder)
    if not file.is_file():
        migration.notes[f"deepspeed {chosen}"] = (
            "this file was not found; deepspeed.stage stays auto, which the curve does not "
            "depend on"
        )
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RLHFError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, Mapping):
        raise RLHFError(f"{file} has no settings of DeepSpeed: it is not a JSON object")
    return content


def _data(
    migration: Migration, arguments: Arguments, keys: Mapping[str, Any], folder: Path
) -> None:
    """Translate the data sets, and drop the settings of evaluation if no row is held out."""
    read = READERS[arguments.project]
    train, held_out = read(migration, arguments.variant, keys, folder)
    rules = PROJECTS[arguments.project].keys
    for name, entries in (("data.train", train), ("data.eval", held_out)):
        if entries:
            origin, rows = (
                [key for key in arguments.keys if key in rules and rules[key].ours == ours]
                for ours in (name, "data.train")
            )
            migration.set(name, entries, ", ".join(origin or rows))
    if not held_out and {"train.eval_every", "train.eval_at_start"} & migration.settings.keys():
        migration.drop("train.eval_every")
        migration.drop("train.eval_at_start")
        migration.notes["evaluation"] = "there are no held-out rows; set data.eval"
    if "data.too_long" not in migration.settings:
        migration.set("data.too_long", "cut", f"{migration.title} cuts longer rows")
