"""A trainer's name, a YAML file and the words of a command line become a checked configuration."""

import functools
import os
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
from attrs import field, frozen

from rlhf.config.field_docs import documented
from rlhf.config.sections import (
    Config,
    DataEntry,
    Extensions,
    Observers,
    OptimConfig,
    OptimizerKind,
    RolloutsConfig,
)
from rlhf.config.source_names import DEMO
from rlhf.config.structure import as_mapping, structure
from rlhf.errors import RLHFError
from rlhf.plugin import BackendPlugin, RolloutPlugin, TrainerPlugin
from rlhf.registry.imports import demo_file, demo_plugin, load_record
from rlhf.registry.installed import Installed, find, find_backend
from rlhf.registry.trainer_files import load_trainer
from rlhf.request.rules import check_demos, contradictions, missing_inputs
from rlhf.request.settings_tree import (
    load_demo,
    load_recorded,
    load_yaml,
    merge,
    nested,
    to_tree,
    without_removed,
)
from rlhf.request.words import parse_words

T = TypeVar("T")
DEFAULT_ENGINE = RolloutsConfig().engine
Sections = tuple[tuple[str, type], ...]
"""Names of plugins, each with the class of its settings."""
HANDED_OVER = ("demo", "notes", "resume", "overwrite")
"""What ranks get of a request besides its configuration."""


@documented
@frozen(kw_only=True)
class Request:
    """What a command such as `rlhf run` has to do."""

    name: str
    """The trainer's name."""
    config: Config
    """The checked configuration, as requested. That of a run is resolved: it has the run's choices
    in place of `auto`."""
    plugin: TrainerPlugin
    """The trainer's record."""
    demo: bool = False
    """The trainer's own demo runs, since the user named neither model nor data."""
    notes: tuple[str, ...] = ()
    """Remarks on the configuration that the run prints, one per line."""
    nproc: int | None = None
    """The value of `--nproc`."""
    resume: str | None = None
    """None: start; "": continue from the newest checkpoint; `step-N`: continue from that one."""
    overwrite: bool = False
    """Whether `--overwrite` was passed."""
    argv: list[str] = field(factory=list)
    """The words of `rlhf run` that ask for the same run, as its ranks get them."""
    origin: Installed | None = None
    """The plugin that provides the trainer, for error messages."""
    trainer: str = ""
    """The name by which `read_config` finds the trainer again from any folder."""


def read_config(
    name: str,
    *,
    recorded: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    inputs: bool = True,
    argv: Sequence[str] = (),
    backend: tuple[str, BackendPlugin] | None = None,
) -> Request:
    """Return the request for the trainer `name` (or `FILE.py:CLASS`).

    `overrides` are words of the command line; one may be the YAML file. The layers, each over the
    one before: core's defaults, the trainer's, the demo's, the backend's, the YAML, the overrides.
    Instead of a user's YAML, `recorded` is the config.yaml of a run folder, which may hold settings
    that have since been removed, and `settings` is the tree of a configuration. With `inputs`
    False, model and data may be missing. `backend` is the name and the record of a backend that
    need not be installed. Raises RLHFError with all problems at once.
    """
    words = parse_words(overrides)
    trainer, plugin = load_trainer(name)
    file = load_recorded(recorded) if recorded else settings or load_yaml(words.source)
    chosen = dict(words.overrides).get("backend", file.get("backend"))
    if backend is None:
        installed = find_backend(chosen if chosen is None else str(chosen))
        backend = installed.name, load_record(installed)
    section, record = backend
    layers: list[Mapping[str, Any]] = [file, *(nested(*item) for item in words.overrides)]
    named: dict[str, Sections] = {}
    for kind in ("extension", "observer"):
        names, layers = as_sections(f"{kind}s", layers)
        named[f"{kind}s"] = tuple((each, load_record(find(kind, each)).config) for each in names)
    engine = _engine_of(layers)
    cls = config_class(
        trainer.name, plugin.config, section, record.config, *named.values(), name,
        record.optimizers, ((engine[0], engine[1].config),) if engine else (),
    )  # fmt: skip
    layers[0] = without_removed(cls, layers[0]) if recorded else layers[0]
    sections = ("model", "data", "optim", *named, trainer.name, section)
    tree = merge(cls, {each: {} for each in sections}, *layers)
    # In the order of the last list of names.
    for key, listed in named.items():
        tree[key] = {each: tree[key].get(each) for each, _ in listed}
    implied = record.defaults(tree[section]) if record.defaults else {}
    tree = merge(cls, *(nested(*item) for item in implied.items()), tree)
    no_model = inputs and not {"path", "init"} & set(tree["model"])
    demo = no_model and "train" not in tree["data"]
    tree = merge(cls, load_demo(demo_file(trainer, plugin) if demo else None), tree)
    rows = str(as_mapping(DataEntry, tree["data"].get("train")).get("path"))
    if no_model and rows.startswith(DEMO):
        tree = merge(cls, demo_plugin(rows).settings(trainer.name), tree)
    defaults = trainer_defaults(cls, trainer, plugin)
    notes = _scale_rate_for_lora(defaults, tree, trainer.name)
    tree = merge(cls, defaults, tree) | {"backend": chosen or section}
    checks = record.check, plugin.check if inputs else None, engine[1].check if engine else None
    config = _checked(cls, tree, checks, inputs=inputs)
    if inputs:
        check_demos(config)
    return Request(
        name=trainer.name,
        config=config,
        plugin=plugin,
        demo=demo,
        notes=notes,
        nproc=words.nproc,
        resume=words.resume,
        overwrite=words.overwrite,
        argv=list(argv),
        origin=trainer,
        trainer=trainer.value if ":" in name else name,
    )


def handed_over(request: Request) -> bytes:
    """Return a request for the ranks that this process starts. They read neither the command line
    nor the user's files again, which may have changed since."""
    parts = {name: getattr(request, name) for name in HANDED_OVER}
    return pickle.dumps((request.trainer, to_tree(request.config), parts))


def received(file: int) -> Request:
    """Return the request in an open file, which other ranks read, too."""
    trainer, settings, parts = pickle.loads(os.pread(file, os.fstat(file).st_size, 0))
    return attrs.evolve(read_config(trainer, settings=settings), **parts)


def trainer_defaults(cls: type, trainer: Installed, plugin: TrainerPlugin) -> dict[str, Any]:
    """Return the trainer's defaults as a tree. Raises RLHFError for an unknown setting or a wrong
    value, which is the plugin's mistake and not the user's."""
    tree = merge(cls, {"optim": {}}, *(nested(*item) for item in plugin.defaults.items()))
    _, problems = structure(tree, cls)
    if problems:
        raise RLHFError(f"{trainer} has a wrong default: {'; '.join(problems)}")
    return tree


@functools.cache
def config_class(
    trainer: str,
    trainer_config: type,
    backend: str,
    backend_config: type,
    extensions: Sections = (),
    observers: Sections = (),
    key: str = "",
    optimizers: tuple[OptimizerKind, ...] = (),
    rollouts: Sections = (),
) -> type[Config]:
    """Return Config with the sections of a trainer, a backend, extensions, observers and an engine
    of rollouts. Its instances can be pickled. `key` is what the trainer was found by, `optimizers`
    are those of the backend."""
    if trainer == backend:
        raise RLHFError(f"trainer and backend are both called '{trainer}'; choose another backend")
    made_of = (
        trainer, trainer_config, backend, backend_config, extensions, observers, key, optimizers,
        rollouts,
    )  # fmt: skip
    body = {
        "trainer_key": key or trainer,
        "trainer_name": trainer,
        "backend_name": backend,
        "optimizers": optimizers,
        "__reduce__": lambda self: _remade(self, config_class, *made_of),
    }
    sections = {trainer: trainer_config, backend: backend_config}
    if extensions:
        sections["extensions"] = sections_class(Extensions, extensions)
    if observers:
        sections["observers"] = sections_class(Observers, observers)
    if rollouts:
        sections["rollouts"] = sections_class(RolloutsConfig, rollouts)
    return attrs.make_class(
        "RunConfig",
        {name: field(type=cls, factory=cls) for name, cls in sections.items()},
        bases=(Config,),
        class_body=body,
        frozen=True,
        kw_only=True,
        slots=True,
    )


def _engine_of(layers: Sequence[Mapping[str, Any]]) -> tuple[str, RolloutPlugin] | None:
    """Return the name and the record of the engine that the last layer with one names. The default
    is needed only where answers are written, and has no settings."""
    found = [as_mapping(RolloutsConfig, layer.get("rollouts")).get("engine") for layer in layers]
    name = next((str(each) for each in reversed(found) if each is not None), DEFAULT_ENGINE)
    return None if name == DEFAULT_ENGINE else (name, load_record(find("rollouts", name)))


def _scale_rate_for_lora(
    defaults: dict[str, Any], tree: Mapping[str, Any], name: str
) -> tuple[str, ...]:
    """Multiply the default learning rate by ten if an adapter is trained; returns a note on it.

    LoRA's best rate is about ten times that of all weights (Schulman et al., "LoRA Without
    Regret", 2025).
    """
    has_adapter = tree.get("lora") is not None or tree["model"].get("adapter")
    if not has_adapter or "lr" in tree["optim"]:
        return ()
    rate = 10 * defaults["optim"].get("lr", OptimConfig().lr)
    defaults["optim"]["lr"] = float(f"{rate:.6g}")
    return (f"optim.lr is {rate:g} with LoRA: ten times the default of {name}",)


def _checked(
    cls: type, tree: dict[str, Any], checks: Sequence[Callable[[Any], None] | None], *, inputs: bool
) -> Config:
    """Return the configuration in `tree`. Raises RLHFError with everything that is wrong in it."""
    config, problems = structure(tree, cls)
    if config is not None:
        problems = contradictions(config) + (missing_inputs(config) if inputs else [])
        for check in filter(None, checks):
            try:
                check(config)
            except RLHFError as error:
                problems.append(str(error))
    if problems:
        head = f"{len(problems)} problems in the configuration\n  " if len(problems) > 1 else ""
        raise RLHFError(head + "\n  ".join(problems))
    return config


def as_sections(
    key: str, layers: Iterable[Mapping[str, Any]]
) -> tuple[list[str], list[Mapping[str, Any]]]:
    """Return the names in the setting `key`, and the layers of a configuration with a section for
    each of them instead of a list of names.

    A list replaces the names of the layers before it and keeps the settings that they have for its
    names; a mapping adds to them.
    """
    names: list[str] = []
    named = []
    for layer in layers:
        value = layer.get(key, {})
        if not isinstance(value, Mapping):
            names = []
            value = [] if value is None else value if isinstance(value, list | tuple) else [value]
            value = dict.fromkeys(map(str, value))
        names += [name for name in map(str, value) if name not in names]
        named.append({**layer, key: value} if key in layer else layer)
    return names, named


@functools.cache
def sections_class(base: type[T], sections: Sections) -> type[T]:
    """Return `base` with these sections. Its instances can be pickled."""
    fields = {
        re.sub(r"\W", "_", name): field(type=cls, factory=cls, metadata={"setting": name})
        for name, cls in sections
    }
    body = {
        "__doc__": base.__doc__,
        "__reduce__": lambda self: _remade(self, sections_class, base, sections),
    }
    return attrs.make_class(
        f"Run{base.__name__}", fields, bases=(base,), class_body=body, frozen=True, kw_only=True
    )


def _remade(config: Any, make: Callable[..., type], *made_of: Any) -> tuple[Any, ...]:
    """Return how pickle makes an instance of a class again, which `make` has made."""
    return _make, (make, made_of, attrs.asdict(config, recurse=False))


def _make(make: Callable[..., type], made_of: tuple[Any, ...], values: Mapping[str, Any]) -> Any:
    return make(*made_of)(**values)
