"""What the first module of a plugin imports: light records, which load neither torch nor
transformers."""

import math
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from rlhf.config.field_docs import documented
from rlhf.config.reference_modes import check_reference
from rlhf.config.sections import (
    ADAMW,
    LORA_VARIANTS,
    READ_BASE,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    OptimizerKind,
)
from rlhf.config.source_names import check_model_folder, without_revisions
from rlhf.errors import RLHFError

__all__ = [
    "ADAMW",
    "LORA_VARIANTS",
    "READ_BASE",
    "BackendPlugin",
    "CommandPlugin",
    "Config",
    "DataConfig",
    "DemoPlugin",
    "ExportPlugin",
    "ExtensionPlugin",
    "FormatPlugin",
    "KernelsPlugin",
    "MediaPlugin",
    "ModelConfig",
    "ObserverPlugin",
    "OptimConfig",
    "OptimizerKind",
    "RLHFError",
    "RolloutPlugin",
    "TrainerPlugin",
    "check_model_folder",
    "check_reference",
    "check_rules",
    "documented",
    "positive",
    "without_revisions",
]


@documented
@frozen(kw_only=True)
class TrainerPlugin:
    """A training workflow, found under the entry-point group `rlhf.trainers`.

    The entry point's name is the command (`rlhf run NAME`), the config section and the flag prefix.
    """

    config: type
    """The frozen attrs class of the trainer's own section."""
    trainer: str
    """Import string `module:Class` of the `rlhf.trainer.Trainer` subclass, imported once the
    configuration is valid."""
    defaults: Mapping[str, Any] = field(factory=dict)
    """Changes of core's defaults for this trainer by dotted name, such as `{"optim.lr": 1e-6}`."""
    demo: str | None = None
    """The YAML of `rlhf run NAME` without model and data: a file in the trainer's package. Paths in
    `data.train` and `data.eval` may be relative to its folder."""
    report: str | None = None
    """Import string of `report(config, folder)`, called after the demo to show what changed."""
    check: Callable[[Any], None] | None = None
    """`check(config)` raises RLHFError if a run of this trainer lacks something. Called if the
    command needs model and data, before torch is imported."""
    requires: tuple[str, ...] = ()
    """Extra distributions that this trainer needs, such as `peft>=0.18`; an error names the one
    that is missing."""


@documented
@frozen(kw_only=True)
class BackendPlugin:
    """An implementation of the backend hooks, found under `rlhf.backends`."""

    config: type
    """The frozen attrs class of the backend's own section."""
    hooks: str
    """Import string `module:Class` of the class with the hook implementations, created without
    arguments."""
    check: Callable[[Any], None] | None = None
    """`check(config)` raises RLHFError for impossible combinations across sections. Called before
    torch is imported."""
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """`defaults(section)` returns changes of core's defaults by dotted name, such as
    `{"model.dtype": "fp16"}`, that follow from the backend's section as the user wrote it."""
    optimizers: tuple[OptimizerKind, ...] = (ADAMW,)
    """The optimizers among which `optim.name` chooses. `build_optimizer` makes them."""
    tested: Mapping[str, Mapping[str, Any]] = field(factory=lambda: {"default": {}})
    """Settings of the section under which the kits of rlhf-devkit run, by a name: one entry for
    each way to divide a model, the plainest first."""


@frozen
class NoSettings:
    """This plugin has no settings."""


@documented
@frozen(kw_only=True)
class ExtensionPlugin:
    """A change of what a backend does, found under `rlhf.extensions`."""

    hooks: str
    """Import string `module:Class` of the class with the hook wrappers, imported when a run
    starts. It is created with its section of the configuration: `Class(config)`; without `config`,
    with no argument."""
    config: type = NoSettings
    """The frozen attrs class of its settings, which are `extensions: {NAME: {SETTING: VALUE}}`."""


@documented
@frozen(kw_only=True)
class ObserverPlugin:
    """A receiver of what happens in a run, found under `rlhf.observers`."""

    hooks: str
    """Import string `module:Class` of the class with the hook implementations, imported when a run
    starts. It is created with its section of the configuration: `Class(config)`; without `config`,
    with no argument."""
    config: type = NoSettings
    """The frozen attrs class of its settings, which are `observers: {NAME: {SETTING: VALUE}}`. Run
    folders record them, so a password or a token is none of them: read it from the environment."""


def no_arguments(parser: ArgumentParser) -> None:
    """Add no argument."""


@documented
@frozen(kw_only=True)
class CommandPlugin:
    """A command, found under `rlhf.commands`. The entry point's name is what users type."""

    help: str
    """One line for `rlhf --help`."""
    run: str
    """Import string `module:function`, imported when the command is called. The function gets the
    options as keywords, after the `Request` if `takes` is not "nothing", and returns the exit
    code."""
    arguments: Callable[[ArgumentParser], None] = no_arguments
    """Adds the command's own arguments to its parser."""
    takes: Literal["nothing", "settings", "run"] = "nothing"
    """What follows the options: "run" is what `rlhf run` takes, a trainer's name, a YAML file and
    settings; with "settings" model and data may be missing."""


@documented
@frozen(kw_only=True)
class FormatPlugin:
    """A row format, found under `rlhf.formats`. A trainer names it in `row_format`."""

    read: str
    """Import string of a `rlhf.formats.RowFormat`, such as a function that `rlhf_rows.row_format`
    decorates."""
    demo: str | None = None
    """Import string of `demo(problem, draw)`, which returns a row in this format made of a
    `rlhf_demo.Problem` of rlhf-demo, with a `random.Random`: the rows of `demo:arithmetic`."""


@documented
@frozen(kw_only=True)
class DemoPlugin:
    """Rows and a small model, found under `rlhf.demos`: `demo:NAME` as a path of data or models."""

    rows: Callable[[str, str], list[dict[str, Any]]]
    """`rows(split, format)` returns the rows of `train` or `eval` in a row format."""
    model_folder: Callable[[], Path]
    """Returns the folder of the model."""
    settings: Callable[[str], dict[str, Any]]
    """`settings(trainer)` returns those of a run on the rows for which the user names no model."""


@documented
@frozen(kw_only=True)
class ExportPlugin:
    """What adds files to model folders, found under `rlhf.exports`, such as the model card."""

    write: str
    """Import string of `write(folder, run, *, role, until)`, called when the model of `role` in
    `folder` is complete: in a run, by `rlhf export` and, for the adapter of a run, `rlhf merge`.
    The run in the folder `run` had trained it up to the step `until`, or to its end if that is
    infinite."""


@documented
@frozen(kw_only=True)
class KernelsPlugin:
    """Fused and compiled layers, found under `rlhf.kernels`."""

    kernels: str
    """Import string of the module that implements them, imported when a model is loaded."""


@documented
@frozen(kw_only=True)
class MediaPlugin:
    """What reads images, found under `rlhf.media` by the name `images`."""

    reader: str
    """Import string `module:Class` of a `rlhf.formats.ImageReader`, imported when a row has an
    image. It is created as `Class(model, tokenizer)`, with the section `model`."""
    values: str
    """Import string `module:function`, imported when a step with images is rehearsed. The function
    returns a context manager of `move(tensor)`, which moves a tensor of a batch to the meta device
    so that models can read its values there, and those of what they compute of such tensors."""


@documented
@frozen(kw_only=True)
class RolloutPlugin:
    """A generation engine, found under `rlhf.rollouts`. A configuration names it in
    `rollouts.engine`."""

    engine: str
    """Import string `module:Class` of a `rlhf.rollouts.RolloutEngine`, imported when a run writes
    its first answer."""
    config: type = NoSettings
    """The frozen attrs class of its settings, which are `rollouts: {NAME: {SETTING: VALUE}}`. Run
    folders record them. A resumed run may change them."""
    check: Callable[[Any], None] | None = None
    """`check(config)` raises RLHFError for what the engine cannot do. Called before torch is
    imported."""
    images: bool = False
    """Whether `sample` takes `inputs`, which prompts with images have."""


RECORDS: dict[str, Any] = {
    "trainer": TrainerPlugin,
    "backend": BackendPlugin,
    "extension": ExtensionPlugin,
    "observer": ObserverPlugin,
    "command": CommandPlugin,
    "demo": DemoPlugin,
    "export": ExportPlugin,
    "format": FormatPlugin,
    "kernels": KernelsPlugin,
    "media": MediaPlugin,
    "rollouts": RolloutPlugin,
}
"""The class of the record of each kind of plugin."""


def positive(kind: type[Any]) -> Callable[[str], Any]:
    """Return a `type` for `ArgumentParser.add_argument` that accepts numbers above 0."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < math.inf:
            raise ArgumentTypeError(f"expected a number above 0, got {text!r}")
        return value

    return read


Rule = tuple[str, object]
"""The message for a contradiction between settings, and a true value if it applies."""


def check_rules(*rules: Rule) -> None:
    """Raise ValueError with the first message that applies; for `__attrs_post_init__`."""
    for message in broken_rules(*rules):
        raise ValueError(message)


def broken_rules(*rules: Rule) -> list[str]:
    """Return the messages that apply."""
    return [message for message, applies in rules if applies]
