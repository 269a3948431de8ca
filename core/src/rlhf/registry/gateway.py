"""The chosen plugins behind one typed gateway per kind; hooks are called from nowhere else."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import pluggy

from rlhf.config.sections import Config
from rlhf.errors import RLHFError, nearest
from rlhf.hookspecs import BackendHooks, ObserverHooks
from rlhf.plugin import NoSettings
from rlhf.registry.imports import load_object, load_record
from rlhf.registry.installed import Installed, find, find_backend
from rlhf.registry.observers import ObserverGateway

SPECS = {"backend": BackendHooks, "extension": BackendHooks, "observer": ObserverHooks}
BACKEND_HOOKS = [name for name in vars(BackendHooks) if not name.startswith("_")]
CORE = "rlhf.train.default_hooks:DefaultHooks"
"""Core's own `trylast` implementations, for hooks that the backend does not implement."""


def load_hooks(
    config: Config,
    backend: object | None = None,
    observers: Mapping[str, object] = MappingProxyType({}),
) -> tuple[BackendGateway, ObserverGateway]:
    """Return the gateways of the plugins that `config` names; `backend` replaces its backend, and
    `observers` are called after its own."""
    watching = makers_of("observer", config.observers.by_name)
    extensions = [make() for make in makers_of("extension", config.extensions.by_name).values()]
    gateway = build_backend(backend or load_backend(find_backend(config.backend)), extensions)
    return gateway, ObserverGateway(watching | as_makers(observers))


def load_backend(plugin: Installed) -> Any:
    """Return the object with the hook implementations of a backend."""
    loaded = load_object(load_record(plugin).hooks, plugin)
    return loaded() if isinstance(loaded, type) else loaded


def makers_of(kind: str, sections: Mapping[str, Any]) -> dict[str, Callable[[], object]]:
    """Return for each extension or observer what creates it with its section of the configuration.
    Raises RLHFError for a class that cannot work."""
    makers: dict[str, Callable[[], object]] = {}
    for name, section in sections.items():
        cls = hooks_class(find(kind, name))
        makers[name] = cls if isinstance(section, NoSettings) else functools.partial(cls, section)
    return makers


def hooks_class(plugin: Installed) -> Any:
    """Return the class of an extension or an observer. Raises RLHFError unless its hooks can be
    called and it takes the config of its record."""
    record = load_record(plugin)
    cls = load_object(record.hooks, plugin)
    check_hooks(plugin.kind, cls)
    has_config = record.config is not NoSettings
    try:
        inspect.signature(cls).bind(*([record.config] if has_config else []))
    except ValueError:
        return cls  # Its signature is not known.
    except TypeError:
        problem = "its class takes a config, but its record has none; add config= to the record"
        if has_config:
            problem = "its record has a config, but its class takes none; add `config` to __init__"
        raise RLHFError(f"{plugin}: {problem}") from None
    return cls


def build_backend(backend: object, extensions: Iterable[object] = ()) -> BackendGateway:
    """Return the gateway of a backend with the extensions around it, the first as the outermost.
    Raises RLHFError for an implementation that pluggy would call wrongly or not at all."""
    manager = pluggy.PluginManager("rlhf")
    manager.add_hookspecs(BackendHooks)
    check_backend(backend)
    manager.register(load_object(CORE)())
    manager.register(backend)
    for extension in reversed(list(extensions)):
        check_hooks("extension", extension)
        manager.register(extension)
    manager.check_pending()
    return BackendGateway(manager)


def as_makers(observers: Mapping[str, object]) -> dict[str, Callable[[], object]]:
    """Return for each observer, which exists already, a function that returns it."""
    for observer in observers.values():
        check_hooks("observer", observer)
    return {name: functools.partial(lambda it: it, each) for name, each in observers.items()}


def check_backend(backend: object) -> None:
    """Raise RLHFError unless `backend` implements each hook exactly once, not counting wrappers;
    those that core implements may be missing."""
    implemented = check_hooks("backend", backend)
    covered = {*implemented, *check_hooks("backend", load_object(CORE))}
    for hook in BACKEND_HOOKS:
        if implemented.count(hook) > 1:
            raise RLHFError(
                f"backend {_label(backend)} implements '{hook}' twice; remove one implementation"
            )
        if hook not in covered:
            raise RLHFError(_without_hook("backend", backend, hook))


def check_hooks(kind: str, plugin: object) -> list[str]:
    """Return the hooks that `plugin`, an object or a class, implements, without wrappers. Raises
    RLHFError for one that cannot work."""
    reader, implemented = pluggy.PluginManager("rlhf"), []
    _check_marks(kind, plugin, reader)
    for name in dir(plugin):
        options = reader.parse_hookimpl_opts(plugin, name)
        if options is None:
            continue
        hook = options.get("specname") or name
        where = f"{kind} {_label(plugin)}: '{name}'"
        spec = getattr(SPECS[kind], hook, None)
        if spec is None and options["optionalhook"]:
            continue
        if spec is None:
            near = nearest(hook, vars(SPECS[kind]))
            hint = f"; did you mean '{near}'?" if near else ""
            raise RLHFError(f"{where} is not a hook of {kind}s{hint}")
        if kind == "extension" and not options["wrapper"]:
            raise RLHFError(
                f"{where} needs @hookimpl(wrapper=True), since an extension may only wrap hooks"
            )
        _check_parameters(where, spec, getattr(plugin, name))
        _check_wrapper(where, options, getattr(plugin, name))
        if not (options["wrapper"] or options["hookwrapper"]):
            implemented.append(hook)
    return implemented


def _check_marks(kind: str, plugin: object, reader: pluggy.PluginManager) -> None:
    """Raise RLHFError for a method with the name of a hook that is not marked as one, and for an
    extension or an observer without hooks."""
    marked = [name for name in dir(plugin) if reader.parse_hookimpl_opts(plugin, name)]
    for name in vars(SPECS[kind]):
        is_hook = not name.startswith("_") and name not in marked
        if is_hook and inspect.isroutine(getattr(plugin, name, None)):
            raise RLHFError(_without_hook(kind, plugin, name))
    if not marked and kind != "backend":
        raise RLHFError(
            f"{kind} {_label(plugin)} implements no hook; mark its methods with @hookimpl"
        )


def _without_hook(kind: str, plugin: object, hook: str) -> str:
    hint = "; its method of that name has no @hookimpl" if hasattr(plugin, hook) else ""
    return f"{kind} {_label(plugin)} does not implement the hook '{hook}'{hint}"


def _check_wrapper(where: str, options: Mapping[str, Any], implementation: Any) -> None:
    is_wrapper = options["wrapper"] or options["hookwrapper"]
    if is_wrapper and not inspect.isgeneratorfunction(implementation):
        raise RLHFError(
            f"{where} is a wrapper without yield; write `result = yield` and return the result"
        )


def _check_parameters(where: str, spec: Any, implementation: Any) -> None:
    known = [name for name in inspect.signature(spec).parameters if name != "self"]
    for name, parameter in inspect.signature(implementation).parameters.items():
        plain = parameter.replace(annotation=parameter.empty, default=parameter.empty)
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            problem = "which pluggy never passes; use plain parameters"
        elif name not in (*known, "self"):
            problem = f"which the hook does not pass; available: {', '.join(known)}"
        elif parameter.default is not parameter.empty:
            problem = "with a default, so pluggy up to 1.6 never passes it; remove the default"
        else:
            continue
        raise RLHFError(f"{where} takes '{plain}', {problem}")


def _label(plugin: object) -> str:
    cls = plugin if isinstance(plugin, type) else type(plugin)
    return f"{cls.__module__}.{cls.__qualname__}"


class BackendGateway(BackendHooks):
    """The backend's hooks, wrapped by the extensions; their arguments are passed as keywords.

    `rlhf.hookspecs` documents each of them.
    """

    def __init__(self, manager: pluggy.PluginManager) -> None:
        for name in BACKEND_HOOKS:
            setattr(self, name, functools.partial(_call, getattr(manager.hook, name)))


def _call(hook: Any, **arguments: Any) -> Any:
    answer = hook(**arguments)
    if answer is None:
        raise RLHFError(
            f"the hook '{hook.name}' returned None; add a return to the backend or the extension"
        )
    return answer
