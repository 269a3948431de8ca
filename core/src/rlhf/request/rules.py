"""Rules across core's sections: settings that contradict each other and inputs that are missing."""

import attrs

from rlhf.config.sections import READ_BASE, Config, LoraConfig, OptimConfig
from rlhf.config.source_names import DEMO, without_revisions
from rlhf.errors import nearest
from rlhf.plugin import broken_rules
from rlhf.registry.installed import find


def contradictions(config: Config) -> list[str]:
    """Return a message for each combination of settings that is impossible or has no effect."""
    model, optim, train = config.model, config.optim, config.train
    adapter, held_out = model.adapter, config.data.eval
    has_adapter = config.lora is not None or adapter is not None
    steps, constant = train.steps, optim.schedule == "constant"
    unversioned = without_revisions(model.path)
    random, quantized = model.init == "random", model.quantize is not None
    best, lora = config.checkpoint.best, config.lora or LoraConfig()
    readers = [f"lora.{name}" for name in READ_BASE if getattr(lora, name)]
    fp8 = model.fp8 is not None
    compiled, not_compiled = model.kernels == "compile" or fp8, ("liger", "none")
    compiler = "model.fp8" if fp8 else "model.kernels compile"
    past = f"is more than train.steps {steps}; lower it"
    exclusive, remedy = "cannot be combined with", "remove one of the two"
    return optimizer_problems(config) + broken_rules(
        ("model.quantize needs lora or model.adapter", quantized and not has_adapter),
        ("model.adapter continues an existing adapter; remove lora", adapter and config.lora),
        (f"model.adapter {exclusive} model.init random; {remedy}", adapter and random),
        (f"model.quantize {exclusive} model.init random; {remedy}", quantized and random),
        *((f"lora.parameters {exclusive} {name}; {remedy}", lora.parameters) for name in readers),
        *((f"{name} {exclusive} model.fp8; {remedy}", fp8) for name in readers),
        (f"lora.parameters {exclusive} lora.dropout; {remedy}", lora.parameters and lora.dropout),
        (
            f"model.revision has no effect on {unversioned}; remove it",
            model.revision and unversioned,
        ),
        (f"train.stop_at {train.stop_at} {past}", steps and (train.stop_at or 0) > steps),
        (f"optim.warmup {optim.warmup:g} {past}", steps and 1 <= optim.warmup > steps),
        ("optim.warmup must be below 1 or a whole number of steps", max(optim.warmup, 1) % 1),
        (
            "model.fp8 needs compiled layers; set model.kernels to auto",
            fp8 and model.kernels in not_compiled,
        ),
        (f"model.quantize {exclusive} {compiler}; {remedy}", quantized and compiled),
        (
            f"model.recompute selective {exclusive} {compiler}; set it to auto, none or full",
            compiled and model.recompute == "selective",
        ),
        (f"model.router_loss {exclusive} {compiler}; set it to 0", model.router_loss and compiled),
        ("optim.min_lr has no effect with optim.schedule constant", optim.min_lr and constant),
        ("train.eval_every needs data.eval", train.eval_every and not held_out),
        ("train.eval_at_start needs data.eval", train.eval_at_start and not held_out),
        ("train.samples needs data.eval", train.samples and not held_out),
        ("checkpoint.best needs data.eval", best and not held_out),
        ("train.patience needs checkpoint.best", train.patience and not best),
        ("train.patience needs train.eval_every", train.patience and not train.eval_every),
    )


def optimizer_problems(config: Config) -> list[str]:
    """Return a message if the backend does not have the optimizer, and for each setting that the
    optimizer does not have."""
    optim, names = config.optim, [kind.name for kind in config.optimizers]
    if optim.name not in names:
        near = nearest(optim.name, names)
        hint = f"; did you mean {near}?" if near else ""
        expected = f"one of {', '.join(names)}" if len(names) > 1 else names[0]
        return [f'optim.name: expected {expected}, got "{optim.name}"{hint}']
    fields = attrs.fields_dict(OptimConfig)
    return [
        f"optim.{setting} has no effect with optim.name {optim.name}; remove it"
        for setting in config.optimizer_kind.without
        if getattr(optim, setting) != fields[setting].default
    ]


def missing_inputs(config: Config) -> list[str]:
    """Return a message if the model or the data are missing. Without both, the demo runs."""
    return broken_rules(
        (
            "model.path is missing; pass --model FOLDER_OR_HUB_NAME",
            not config.model.path and config.model.init != "random",
        ),
        ("data.train is missing; pass --data FILE_OR_HUB_NAME", not config.data.train),
    )


def check_demos(config: Config) -> None:
    """Raise RLHFError for the first demo that is not installed, before anything loads."""
    for path in (config.model.path, *(e.path for e in config.data.train + config.data.eval)):
        if path.startswith(DEMO):
            find("demo", path.removeprefix(DEMO))
