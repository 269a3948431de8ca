"""A trainer's name, a YAML file and overrides become one checked configuration."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml
from attr import asdict  # attrs.asdict keeps tuples, which no YAML holds.
from attrs import field, frozen

from rlhf.config.sections import Config, OptimConfig
from rlhf.config.structure import as_mapping, section_class, structure
from rlhf.errors import RLHFError, first_line
from rlhf.plugin import TrainerPlugin
from rlhf.registry.installed import Installed, demo_file, find, find_backend, load_record
from rlhf.request.words import parse_words


@frozen(kw_only=True)
class Request:
    """What `rlhf run` and its kin were asked to do."""

    name: str
    """The trainer's name."""
    config: Config
    plugin: TrainerPlugin
    demo: bool = False
    """Neither model nor data was given: the trainer's own demo runs."""
    notes: tuple[str, ...] = ()
    """What the run should say about its configuration, a line each."""
    nproc: int | None = None
    resume: str | None = None
    """None: start; "": go on from the newest checkpoint; `step-N`: from that one."""
    overwrite: bool = False
    argv: list[str] = field(factory=list)
    """The command line after `rlhf`."""
    origin: Installed | None = None
    """Where the trainer comes from, for the error text where it does not import."""


def read_config(
    name: str,
    *,
    source: Path | None = None,
    overrides: Sequence[str] = (),
    inputs: bool = True,
    argv: Sequence[str] = (),
) -> Request:
    """The request for trainer `name` (or `name@distribution`).

    `overrides` are words of the command line; one may be the YAML file instead of `source`. Laid
    over each other: core's defaults, the trainer's, the YAML (or the demo's), the overrides. With
    `inputs` False neither model nor data is asked for. Raises RLHFError with all problems at once.
    """
    words = parse_words(overrides)
    trainer = find("trainer", name)
    plugin = load_record(trainer)
    file = load_yaml(source or words.source)
    chosen = dict(words.overrides).get("backend", file.get("backend"))
    backend = find_backend(chosen if chosen is None else str(chosen))
    record = load_record(backend)
    cls = config_class(trainer.name, plugin.config, backend.name, record.config)

    sections = ("model", "data", "optim", trainer.name, backend.name)
    tree = merge(cls, {section: {} for section in sections}, file)
    for dotted, value in words.overrides:
        tree = merge(cls, tree, _nested(dotted, value))
    demo = inputs and not {"path", "init"} & set(tree["model"]) and "train" not in tree["data"]
    if demo:
        tree = merge(cls, load_yaml(demo_file(trainer, plugin)), tree)
    tree, notes = _with_defaults(cls, tree, trainer.name, plugin)
    tree["backend"] = chosen or backend.name
    return Request(
        name=trainer.name,
        config=_checked(cls, tree, (record.check, plugin.check if inputs else None), inputs=inputs),
        plugin=plugin,
        demo=demo,
        notes=notes,
        nproc=words.nproc,
        resume=words.resume,
        overwrite=words.overwrite,
        argv=list(argv),
        origin=trainer,
    )


Check = Callable[[Any], None]


def to_tree(config: Any) -> dict[str, Any]:
    """Plain data that YAML holds and the reader turns into an equal configuration."""
    return asdict(config, retain_collection_types=False)


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The leaves in which two trees differ, {dotted: (old, new)}; None where one has none."""
    changes: dict[str, tuple[Any, Any]] = {}
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes |= {
                f"{key}.{inner}": pair for inner, pair in changed_keys(before, after).items()
            }
        elif before != after:
            changes[key] = (before, after)
    return changes


@functools.cache
def config_class(
    trainer: str, trainer_config: type, backend: str, backend_config: type
) -> type[Config]:
    """Config with the sections of a trainer and a backend; pickled by what it was made of."""
    if trainer == backend:
        raise RLHFError(f"trainer and backend are both called '{trainer}': choose another backend")
    made_of = (trainer, trainer_config, backend, backend_config)
    body = {
        "trainer_name": trainer,
        "backend_name": backend,
        "__reduce__": lambda self: (_rebuild, (made_of, attrs.asdict(self, recurse=False))),
    }
    sections = {
        trainer: field(type=trainer_config, factory=trainer_config),
        backend: field(type=backend_config, factory=backend_config),
    }
    return attrs.make_class(
        "RunConfig", sections, bases=(Config,), class_body=body, frozen=True, kw_only=True
    )


def _rebuild(made_of: tuple[str, type, str, type], values: dict[str, Any]) -> Config:
    return config_class(*made_of)(**values)


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would take the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"'{key.value}' stands twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def load_yaml(path: Path | None) -> dict[str, Any]:
    """The mapping in a YAML file; no path and an empty file are an empty one."""
    if path is None:
        return {}
    try:
        tree = yaml.load(path.read_text(), Loader=_Loader)
    except OSError as error:
        raise RLHFError(f"{path} cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RLHFError(f"{path} line {line}: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RLHFError(f"{path} is no YAML text: {first_line(error)}") from error
    if not isinstance(tree or {}, dict):
        raise RLHFError(
            f"{path} holds a {type(tree).__name__}, not sections such as `optim: {{lr: 1e-5}}`"
        )
    return tree or {}


def merge(cls: type, under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`, section by section; null switches off a section that is optional."""
    kinds = {item.name: item.type for item in attrs.fields(cls)}
    merged = dict(under)
    for key, value in over.items():
        section = section_class(kinds.get(key))
        if section is None or (value is None and section is not kinds[key]):
            merged[key] = value
        else:
            below = as_mapping(section, merged.get(key))
            merged[key] = merge(section, below, as_mapping(section, value))
    return merged


def _nested(dotted: str, value: Any) -> dict[str, Any]:
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return value


def _with_defaults(
    cls: type, tree: dict[str, Any], name: str, plugin: TrainerPlugin
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The trainer's defaults under `tree`. LoRA's best rate is about ten times that of all weights
    (Schulman et al., "LoRA Without Regret", 2025)."""
    notes = []
    defaults = dict(plugin.defaults)
    if (tree.get("lora") is not None or tree["model"].get("adapter")) and "lr" not in tree["optim"]:
        rate = defaults.get("optim.lr", OptimConfig().lr)
        defaults["optim.lr"] = float(f"{10 * rate:.6g}")
        notes.append(f"optim.lr is {10 * rate:g} by LoRA: ten times the default of {name}")
    under: dict[str, Any] = {}
    for dotted, value in defaults.items():
        under = merge(cls, under, _nested(dotted, value))
    return merge(cls, under, tree), tuple(notes)


def _checked(
    cls: type, tree: dict[str, Any], checks: Sequence[Check | None], *, inputs: bool
) -> Config:
    """The configuration in `tree`, or an RLHFError with all that is wrong in it."""
    config, problems = structure(tree, cls)
    if config is not None:
        problems = _contradictions(config) + (_missing(config) if inputs else [])
        problems += [text for check in checks if check for text in _asked(check, config)]
    if problems:
        head = f"{len(problems)} problems in the configuration\n  " * (len(problems) > 1)
        raise RLHFError(head + "\n  ".join(problems))
    for kind in ("extension", "observer"):
        for name in getattr(config, f"{kind}s"):
            find(kind, name)
    return config


def _contradictions(config: Config) -> list[str]:
    """What core's sections cannot mean together."""
    model, optim, train = config.model, config.optim, config.train
    adapted = config.lora is not None or model.adapter is not None
    steps, constant = train.steps, optim.schedule == "constant"
    random, quantized = model.init == "random", model.quantize is not None
    best, rounded = config.checkpoint.best, optim.states == "bf16"
    compiled = model.kernels == "compile" or model.fp8
    by = "model.fp8" if model.fp8 else "model.kernels compile"
    past = f"is past train.steps {steps}"
    rules = [
        ("model.quantize: needs lora or model.adapter", quantized and not adapted),
        ("model.quantize: needs model.dtype bf16 or fp32", quantized and model.dtype == "fp16"),
        ("model.adapter: is trained on itself; take lora away", model.adapter and config.lora),
        ("model.adapter: does not fit model.init random", model.adapter and random),
        ("model.quantize: does not fit model.init random", quantized and random),
        ("model.revision: has no effect on a folder", model.revision and Path(model.path).is_dir()),
        (f"train.stop_at: {train.stop_at} {past}", steps and (train.stop_at or 0) > steps),
        (f"train.trace: {train.trace} {past}", steps and (train.trace or 0) >= steps),
        (f"optim.warmup: {optim.warmup:g} {past}", steps and 1 <= optim.warmup > steps),
        ("optim.warmup: give a share below 1 or whole steps", max(optim.warmup, 1) % 1),
        ("optim.states: bf16 needs model.dtype bf16", rounded and model.dtype != "bf16"),
        ("model.fp8: needs model.dtype bf16", model.fp8 and model.dtype != "bf16"),
        ("model.fp8: trains whole weights; take the adapter away", model.fp8 and adapted),
        (
            "model.fp8: needs compiled layers; set model.kernels to auto",
            model.fp8 and model.kernels in ("liger", "none"),
        ),
        (f"model.quantize: does not go with {by}", quantized and compiled),
        (
            f"model.recompute: {model.recompute} does not go with {by}; set it to auto, none or "
            f"full",
            compiled and model.recompute in ("selective", "offload"),
        ),
        ("optim.min_lr: has no effect with schedule constant", optim.min_lr and constant),
        ("train.eval_every: needs data.eval", train.eval_every and not config.data.eval),
        ("train.eval_at_start: needs data.eval", train.eval_at_start and not config.data.eval),
        ("checkpoint.best: needs data.eval", best and not config.data.eval),
        ("train.patience: needs checkpoint.best, what has to improve", train.patience and not best),
        ("train.patience: needs train.eval_every", train.patience and not train.eval_every),
    ]
    return [text for text, broken in rules if broken]


def _missing(config: Config) -> list[str]:
    """Only a run that names neither model nor data is the demo."""
    problems = []
    if not config.model.path and config.model.init != "random":
        problems.append("model.path: no model is given; add --model FOLDER_OR_HUB_NAME")
    if not config.data.train:
        problems.append("data.train: no data are given; add --data FILE_OR_HUB_NAME")
    return problems


def _asked(check: Check, config: Config) -> list[str]:
    """A plugin's own check across sections."""
    try:
        check(config)
    except RLHFError as error:
        return [str(error)]
    return []
