"""The plugins that were chosen, behind one typed gateway per kind; nobody else calls a hook."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pluggy

from rlhf.errors import RLHFError
from rlhf.hookspecs import BackendHooks, ObserverHooks
from rlhf.registry.installed import Installed, find, find_backend
from rlhf.registry.load import load_object, load_record
from rlhf.registry.observers import ObserverGateway

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from rlhf.config import Config
    from rlhf.engine import Engine, Mesh, ModelShape, Plan

SPECS = {"backend": BackendHooks, "extension": BackendHooks, "observer": ObserverHooks}
CORE = "rlhf.loop.learning_rate:DefaultSchedule"
"""Core's own `trylast` implementations."""


def load_hooks(config: Config) -> tuple[BackendGateway, ObserverGateway]:
    """The gateways of the plugins that `config` names."""
    return build_gateways(
        load_plugin(find_backend(config.backend)),
        [load_plugin(find("extension", name)) for name in config.extensions],
        {name: load_plugin(find("observer", name)) for name in config.observers},
    )


def load_plugin(plugin: Installed) -> Any:
    """An object with hook implementations: a backend's hooks, an observer or an extension."""
    path = load_record(plugin).hooks if plugin.kind == "backend" else plugin.value
    found = load_object(path, plugin)
    return found() if isinstance(found, type) else found


def build_gateways(
    backend: object,
    extensions: Iterable[object] = (),
    observers: Mapping[str, object] = MappingProxyType({}),
) -> tuple[BackendGateway, ObserverGateway]:
    """Return the gateways of these objects. The first extension is the outermost, the first
    observer is called first. Raises RLHFError for an implementation that pluggy would call wrongly
    or not at all."""
    core = load_object(CORE)()
    manager = pluggy.PluginManager("rlhf")
    manager.add_hookspecs(BackendHooks)
    check_backend(backend, defaults=core)
    manager.register(core)
    manager.register(backend)
    for extension in reversed(list(extensions)):
        list(check_hooks("extension", extension))
        manager.register(extension)
    manager.check_pending()
    for observer in observers.values():
        list(check_hooks("observer", observer))
    return BackendGateway(manager), ObserverGateway(observers)


def check_backend(backend: object, *, defaults: object) -> None:
    """Every backend hook must have exactly one implementation beside `defaults` and wrappers."""
    given = list(check_hooks("backend", backend))
    covered = {*given, *check_hooks("backend", defaults)}
    for hook in (name for name in vars(BackendHooks) if not name.startswith("_")):
        if given.count(hook) > 1:
            raise RLHFError(
                f"backend {_label(backend)} implements '{hook}' twice: one answer is possible"
            )
        if hook not in covered:
            unmarked = (
                "; it has a method of that name without @hookimpl" if hasattr(backend, hook) else ""
            )
            raise RLHFError(f"backend {_label(backend)} lacks the hook '{hook}'{unmarked}")


def check_hooks(kind: str, plugin: object) -> Iterator[str]:
    """The hooks that `plugin` implements, wrappers left out; RLHFError for one that cannot work."""
    reader = pluggy.PluginManager("rlhf")
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
            near = difflib.get_close_matches(hook, vars(SPECS[kind]), n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise RLHFError(f"{where} is not a hook of {kind}s{hint}")
        if kind == "extension" and not options["wrapper"]:
            raise RLHFError(
                f"{where} is not @hookimpl(wrapper=True): an extension may only wrap hooks"
            )
        _check_parameters(where, spec, getattr(plugin, name))
        if not (options["wrapper"] or options["hookwrapper"]):
            yield hook


def _check_parameters(where: str, spec: Any, implementation: Any) -> None:
    known = [name for name in inspect.signature(spec).parameters if name != "self"]
    for name, parameter in inspect.signature(implementation).parameters.items():
        bare = parameter.replace(annotation=parameter.empty, default=parameter.empty)
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            problem = "which pluggy never fills: name plain parameters"
        elif name not in known:
            problem = f"which the hook does not give; it gives {', '.join(known)}"
        elif parameter.default is not parameter.empty:
            problem = "with a default, and pluggy up to 1.6 then never fills it: drop the default"
        else:
            continue
        raise RLHFError(f"{where} takes '{bare}', {problem}")


def _label(plugin: object) -> str:
    return f"{type(plugin).__module__}.{type(plugin).__qualname__}"


class BackendGateway:
    """The backend's hooks, wrapped by the extensions. `rlhf.hookspecs` says what each answers."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self._hooks = manager.hook

    def _ask(self, hook: str, **arguments: Any) -> Any:
        answer = getattr(self._hooks, hook)(**arguments)
        if answer is None:
            raise RLHFError(
                f"the hook '{hook}' gave None: the backend or an extension forgot its return"
            )
        return answer

    def setup_mesh(self, *, config: Config) -> Mesh:
        return self._ask("setup_mesh", config=config)

    def configure_zero(self, *, config: Config, mesh: Mesh, model_shape: ModelShape) -> Plan:
        return self._ask("configure_zero", config=config, mesh=mesh, model_shape=model_shape)

    def estimate_memory(
        self, *, config: Config, plan: Plan, model_shape: ModelShape, mesh: Mesh, trained: bool
    ) -> Mapping[str, int]:
        return self._ask(
            "estimate_memory",
            config=config,
            plan=plan,
            model_shape=model_shape,
            mesh=mesh,
            trained=trained,
        )

    def model_context(self, *, plan: Plan, role: str) -> AbstractContextManager[Any]:
        return self._ask("model_context", plan=plan, role=role)

    def load_weights(
        self, *, module: nn.Module, weights: Mapping[str, Tensor] | None, plan: Plan, mesh: Mesh
    ) -> tuple[str, ...]:
        return self._ask("load_weights", module=module, weights=weights, plan=plan, mesh=mesh)

    def build_optimizer(
        self, *, groups: Sequence[Mapping[str, Any]], config: Config, plan: Plan
    ) -> Optimizer:
        return self._ask("build_optimizer", groups=groups, config=config, plan=plan)

    def build_schedule(self, *, optimizer: Optimizer, config: Config, steps: int) -> LRScheduler:
        return self._ask("build_schedule", optimizer=optimizer, config=config, steps=steps)

    def prepare(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer | None,
        schedule: LRScheduler | None,
        role: str,
        plan: Plan,
        mesh: Mesh,
    ) -> Engine:
        return self._ask(
            "prepare",
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            role=role,
            plan=plan,
            mesh=mesh,
        )

    def save_checkpoint(self, *, engine: Engine, directory: Path, state: Mapping[str, Any]) -> bool:
        return self._ask("save_checkpoint", engine=engine, directory=directory, state=state)

    def load_checkpoint(self, *, engine: Engine, directory: Path) -> Mapping[str, Any]:
        return self._ask("load_checkpoint", engine=engine, directory=directory)

    def read_weights(self, *, directory: Path) -> Mapping[str, Tensor]:
        return self._ask("read_weights", directory=directory)

    def export_weights(self, *, engine: Engine, directory: Path) -> bool:
        return self._ask("export_weights", engine=engine, directory=directory)

    def mix_weights(self, *, engine: Engine, source: Engine, share: float) -> bool:
        return self._ask("mix_weights", engine=engine, source=source, share=share)

    def generation_context(self, *, engine: Engine) -> AbstractContextManager[Any]:
        return self._ask("generation_context", engine=engine)

    def close_mesh(self, *, mesh: Mesh) -> bool:
        return self._ask("close_mesh", mesh=mesh)
