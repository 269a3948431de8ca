"""What the settings of a model are called in errors: a run may load several models."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from rlhf.config.sections import Config, ModelConfig
from rlhf.config.structure import setting_name
from rlhf.errors import RLHFError
from rlhf.model.role import POLICY

SETTING = re.compile(rf"(?<![\w.])model\.({'|'.join(attrs.fields_dict(ModelConfig))})\b")
"""A setting of the section `model` in a text."""
CORE = attrs.fields_dict(Config).keys()
"""The other sections are those of plugins."""


@contextmanager
def naming_model(config: Config, role: str, model: ModelConfig | None) -> Iterator[None]:
    """Name the role in an error of this block about its model, and the settings of `model` as the
    user knows them; None is the model of the configuration."""
    try:
        yield
    except RLHFError as error:
        text = str(error)
        if model is not None:
            text = SETTING.sub(lambda found: name_in_errors(config, model, found[1]), text)
        # Such as `kd.teacher`, or in a block inside of another one.
        is_named = f".{role} " in text or text.startswith(f"{role}: ")
        error.args = (text if is_named or role == POLICY else f"{role}: {text}",)
        raise


def name_in_errors(config: Config, model: ModelConfig, field: str) -> str:
    """Return what a field of a role's model is called: the trainer's setting that has its folder or
    the revision of that folder, else the section `model` if the folder is that of `model.path`,
    else the class."""
    of_folder = setting_with(config, model.path)
    revision = f"{of_folder}_revision"
    if field == "path" and of_folder:
        return of_folder
    if field == "revision" and revision in dict(own_settings(config)):
        return revision
    # Trainers pass the permission of the section `model` on.
    is_permission = field == "trust_remote_code" and not config.model.trust_remote_code
    section = "model" if is_permission or model.path == config.model.path else ModelConfig.__name__
    return f"{section}.{field}"


def setting_with(config: Config, folder: str) -> str:
    """Return the plugin's setting whose value is this folder of a model; "" if there is none."""
    return next((name for name, value in own_settings(config) if value and value == folder), "")


def own_settings(config: Config) -> list[tuple[str, object]]:
    """Return the settings of the trainer and the backend with their dotted names; the sections of a
    list have its name."""
    names = [name for name in attrs.fields_dict(type(config)) if name not in CORE]
    return [pair for name in names for pair in settings_in(name, getattr(config, name))]


def settings_in(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the settings of a section, or of each of a list, with their dotted names."""
    for section in value if isinstance(value, tuple) else (value,):
        for item in attrs.fields(type(section)) if attrs.has(type(section)) else ():
            pair = f"{name}.{setting_name(item)}", getattr(section, item.name)
            yield pair
            yield from settings_in(*pair)
