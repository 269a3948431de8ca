"""Hooks behind the gateways: who answers, who wraps, and every implementation that cannot work."""

import inspect
import pickle
from collections.abc import Generator
from pathlib import Path
from typing import Any

import attrs
import pytest

import rlhf.train.default_hooks  # noqa: F401  The fixture `install` hides torch.
from rlhf.config.sections import Config
from rlhf.errors import RLHFError
from rlhf.hookspecs import BackendHooks, ObserverHooks, RunRecord, hookimpl
from rlhf.registry.gateway import load_hooks
from rlhf.registry.imports import load_object
from rlhf.request.reader import read_config
from rlhf_devkit.distributions import Install
from rlhf_devkit.gateways import build_gateways

HERE = __name__
RUN = RunRecord(name="toy", folder=Path("nowhere"), config=Config(), steps=3)
NAMES = [name for name in vars(BackendHooks) if not name.startswith("_")]


def backend(*, without: str = "build_schedule", **instead: Any) -> Any:
    """A backend that answers each hook with the hook's name and its arguments."""
    body: dict[str, Any] = {}
    for name in NAMES:
        if name != without:
            parameters = list(inspect.signature(getattr(BackendHooks, name)).parameters)
            scope: dict[str, Any] = {}
            exec(f"def {name}({', '.join(parameters)}): return '{name}', locals()", scope)
            body[name] = hookimpl(scope[name])
    return type("Backend", (), {**body, **instead, "__module__": HERE})()


def refused(*arguments: Any, **keywords: Any) -> str:
    with pytest.raises(RLHFError) as caught:
        build_gateways(*arguments, **keywords)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_each_method_of_the_gateway_calls_its_hook_with_keywords_only(name: str) -> None:
    gateway, _ = build_gateways(backend(without=""))
    parameters = list(inspect.signature(getattr(BackendHooks, name)).parameters)[1:]
    arguments = {key: object() for key in parameters}
    hook, received = getattr(gateway, name)(**arguments)
    del received["self"]
    assert (hook, received) == (name, arguments)
    with pytest.raises(TypeError):
        getattr(gateway, name)(object())


def test_the_gateway_of_observers_passes_every_argument_of_each_hook() -> None:
    received = []
    body: dict[str, Any] = {}
    hooks = {name: spec for name, spec in vars(ObserverHooks).items() if not name.startswith("_")}
    for name, spec in hooks.items():
        parameters = ", ".join(inspect.signature(spec).parameters)
        scope: dict[str, Any] = {"received": received}
        exec(f"def {name}({parameters}): received.append(('{name}', locals()))", scope)
        body[name] = hookimpl(scope[name])
    _, observers = build_gateways(backend(), observers={"all": type("All", (), body)()})
    for name, spec in hooks.items():
        arguments: dict[str, Any] = dict.fromkeys(list(inspect.signature(spec).parameters)[1:])
        getattr(observers, name)(**arguments)
        hook, given = received.pop()
        assert (hook, {**given, "self": None}) == (name, {**arguments, "self": None})


def test_an_extension_edits_the_plan_and_the_first_is_the_outermost() -> None:
    class Outer:
        @hookimpl(wrapper=True)
        def configure_zero(self, model_shape: Any) -> Generator[None, Any, Any]:
            return ["outer", model_shape, *(yield)]

    class Inner:
        @hookimpl(wrapper=True)
        def configure_zero(self) -> Generator[None, Any, Any]:
            return ["inner", *(yield)]

    gateway, _ = build_gateways(backend(), [Outer(), Inner()])
    plan = gateway.configure_zero(  # type: ignore[arg-type]
        config="c", mesh="m", model_shape="s", role="policy", trained=True, occupied=0
    )
    assert plan[:4] == ["outer", "s", "inner", "configure_zero"]  # type: ignore[index]


def test_observers_are_called_in_the_order_in_which_they_are_named() -> None:
    heard: list[tuple[str, Any]] = []

    class Observer:
        def __init__(self, name: str) -> None:
            self.name = name

        @hookimpl
        def on_step(self, step: int) -> None:
            heard.append((self.name, step))

    named = {name: Observer(name) for name in ("first", "second")}
    _, observers = build_gateways(backend(), observers=named)
    observers.on_step(run=RUN, step=3, metrics={})
    observers.on_finish(run=RUN, error=None)
    assert heard == [("first", 3), ("second", 3)]


class Failing:
    """Changes the metrics, then fails at the step of that number."""

    def __init__(self, step: int, error: BaseException) -> None:
        self.step, self.error = step, error

    @hookimpl
    def on_step(self, step: int, metrics: Any) -> None:
        metrics["loss"] = 0.0
        metrics["counts"].append(9)
        if step == self.step:
            raise self.error


class Listener:
    """Remembers each step's metrics."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, Any]] = []

    @hookimpl
    def on_step(self, step: int, metrics: Any) -> None:
        self.heard.append((step, metrics))


def test_an_observer_that_raises_is_dropped_and_changes_no_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = attrs.evolve(RUN, folder=tmp_path)
    listener = Listener()
    named = {"web": Failing(2, RuntimeError("webhook is down\nsince noon")), "ear": listener}
    _, observers = build_gateways(backend(), observers=named)
    metrics = {"loss": 1.5, "counts": [1]}
    for step in (1, 2, 3):
        observers.on_step(run=run, step=step, metrics=metrics)  # type: ignore[arg-type]
    expected = {"loss": 1.5, "counts": [1]}
    assert metrics == expected
    assert listener.heard == [(1, expected), (2, expected), (3, expected)]
    file = tmp_path / "errors" / "observer-web.txt"
    assert capsys.readouterr().err == (
        "warning: observer 'web' failed in on_step and is not called again: "
        f"RuntimeError: webhook is down; see {file}\n"
    )
    assert "in on_step" in file.read_text()
    assert file.read_text().endswith("RuntimeError: webhook is down\nsince noon\n")


def test_an_observer_whose_traceback_cannot_be_written_prints_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "errors").write_text("in the way")
    _, observers = build_gateways(backend(), observers={"web": Failing(1, ValueError("down"))})
    run = attrs.evolve(RUN, folder=tmp_path)
    observers.on_step(run=run, step=1, metrics={"counts": []})  # type: ignore[dict-item]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("ValueError: down; its traceback:")
    assert lines[1] == "Traceback (most recent call last):"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_in_an_observer_is_raised(error: BaseException) -> None:
    _, observers = build_gateways(backend(), observers={"web": Failing(1, error)})
    with pytest.raises(type(error)):
        observers.on_step(run=RUN, step=1, metrics={"counts": []})  # type: ignore[dict-item]


def test_an_observer_whose_error_cannot_be_printed_is_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ValueError("no \ud800")
    _, observers = build_gateways(backend(), observers={"web": Failing(1, error)})
    run = attrs.evolve(RUN, folder=tmp_path)
    observers.on_step(run=run, step=1, metrics={"counts": []})  # type: ignore[dict-item]
    assert r"is not called again: ValueError: no \ud800; see " in capsys.readouterr().err
    assert (tmp_path / "errors" / "observer-web.txt").read_text().endswith("no \\ud800\n")


def test_core_implements_build_schedule_if_the_backend_does_not() -> None:
    import torch

    from rlhf.config.sections import Config

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    gateway, _ = build_gateways(backend())
    schedule = gateway.build_schedule(optimizer=optimizer, config=Config(), steps=10)
    assert schedule.get_last_lr() == [1.0]
    gateway, _ = build_gateways(backend(without=""))
    answer = gateway.build_schedule(optimizer=optimizer, config=Config(), steps=10)
    assert answer[0] == "build_schedule"  # type: ignore[index]


def test_a_backend_that_lacks_a_hook_is_refused() -> None:
    assert (
        refused(backend(without="prepare"))
        == f"backend {HERE}.Backend does not implement the hook 'prepare'"
    )
    unmarked = backend(prepare=lambda self, model: model)
    assert refused(unmarked) == (
        f"backend {HERE}.Backend does not implement the hook 'prepare'; its method of that "
        "name has no @hookimpl"
    )


def test_a_backend_hook_has_one_implementation() -> None:
    again = hookimpl(specname="setup_mesh")(lambda self, config: config)
    assert refused(backend(start=again)) == (
        f"backend {HERE}.Backend implements 'setup_mesh' twice; remove one implementation"
    )


def test_an_answer_of_none_is_refused() -> None:
    gateway, _ = build_gateways(backend(setup_mesh=hookimpl(lambda self, config: None)))
    with pytest.raises(RLHFError) as caught:
        gateway.setup_mesh(config=None)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "the hook 'setup_mesh' returned None; add a return to the backend or the extension"
    )


class Rival:
    @hookimpl
    def setup_mesh(self, config: Any) -> Any:
        return config


class Misspelt:
    @hookimpl(wrapper=True)
    def confgure_zero(self, config: Any) -> Generator[None, Any, Any]:
        return (yield)


class Later:
    @hookimpl(wrapper=True, optionalhook=True)
    def hook_of_a_later_core(self, config: Any) -> Generator[None, Any, Any]:
        return (yield)


class Unknown:
    @hookimpl(wrapper=True)
    def configure_zero(self, config: Any, model: Any) -> Generator[None, Any, Any]:
        return (yield)


class Default:
    @hookimpl(wrapper=True)
    def configure_zero(self, mesh: Any = None) -> Generator[None, Any, Any]:
        return (yield)


class KeywordOnly:
    @hookimpl(wrapper=True)
    def configure_zero(self, *, mesh: Any) -> Generator[None, Any, Any]:
        return (yield)


class Gathered:
    @hookimpl(wrapper=True)
    def configure_zero(self, **everything: Any) -> Generator[None, Any, Any]:
        return (yield)


class Meddler:
    @hookimpl
    def setup_mesh(self, config: Any) -> Any:
        return config


class Yieldless:
    @hookimpl(wrapper=True)
    def setup_mesh(self, config: Any) -> Any:
        return config


class Unmarked:
    @hookimpl(wrapper=True)
    def setup_mesh(self) -> Generator[None, Any, Any]:
        return (yield)

    def configure_zero(self, mesh: Any) -> Any:
        return (yield)


class Empty:
    pass


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        (
            Yieldless,
            "'setup_mesh' is a wrapper without yield; write `result = yield` and return the result",
        ),
        (
            Rival,
            "'setup_mesh' needs @hookimpl(wrapper=True), since an extension may only wrap hooks",
        ),
        (
            Misspelt,
            "'confgure_zero' is not a hook of extensions; did you mean 'configure_zero'?",
        ),
        (
            Unknown,
            "'configure_zero' takes 'model', which the hook does not pass; "
            "available: config, mesh, model_shape, role, trained, occupied",
        ),
        (
            Default,
            "'configure_zero' takes 'mesh', with a default, so pluggy up to 1.6 never passes "
            "it; remove the default",
        ),
        (
            KeywordOnly,
            "'configure_zero' takes 'mesh', which pluggy never passes; use plain parameters",
        ),
        (
            Gathered,
            "'configure_zero' takes '**everything', which pluggy never passes; "
            "use plain parameters",
        ),
    ],
)
def test_an_extension_that_cannot_work_is_refused(extension: type, message: str) -> None:
    assert refused(backend(), [extension()]) == f"extension {HERE}.{extension.__name__}: {message}"


def test_a_method_with_the_name_of_a_hook_is_marked_as_one() -> None:
    hint = "; its method of that name has no @hookimpl"
    assert refused(backend(), [Unmarked()]) == (
        f"extension {HERE}.Unmarked does not implement the hook 'configure_zero'{hint}"
    )
    unmarked = type("Unmarked", (Listener,), {"on_eval": lambda self, step: None})()
    assert refused(backend(), observers={"ear": unmarked}) == (
        f"observer {HERE}.Unmarked does not implement the hook 'on_eval'{hint}"
    )
    schedule = backend(build_schedule=lambda self, config: config)
    assert refused(schedule) == (
        f"backend {HERE}.Backend does not implement the hook 'build_schedule'{hint}"
    )


def test_a_plugin_without_hooks_is_refused() -> None:
    assert refused(backend(), [Empty()]) == (
        f"extension {HERE}.Empty implements no hook; mark its methods with @hookimpl"
    )
    assert refused(backend(), observers={"ear": Empty()}) == (
        f"observer {HERE}.Empty implements no hook; mark its methods with @hookimpl"
    )


def test_a_hook_of_a_later_core_may_be_optional() -> None:
    build_gateways(backend(), [Later()])


def test_an_observer_implements_no_backend_hook() -> None:
    assert refused(backend(), observers={"meddler": Meddler()}) == (
        f"observer {HERE}.Meddler: 'setup_mesh' is not a hook of observers"
    )


HOOKS = """
    import inspect
    from rlhf.hookspecs import BackendHooks, hookimpl
    from attrs import frozen
    from rlhf.plugin import ExtensionPlugin, ObserverPlugin

    class Plain: ...

    for name, spec in list(vars(BackendHooks).items()):
        if not name.startswith("_") and name != "build_schedule":
            scope = {}
            parameters = ", ".join(inspect.signature(spec).parameters)
            exec(f"def {name}({parameters}): return '{name}'", scope)
            setattr(Plain, name, hookimpl(scope[name]))

    @frozen(kw_only=True)
    class LoudConfig:
        end: str = ""

    class Loud:
        def __init__(self, config):
            self.config = config

        @hookimpl(wrapper=True)
        def setup_mesh(self):
            return (yield).upper() + self.config.end

    loud = ExtensionPlugin(config=LoudConfig, hooks="toy_hooks:Loud")

    listener = ObserverPlugin(hooks="toy_hooks:Listener")

    class Listener:
        heard = []
        @hookimpl
        def on_eval(self, step):
            self.heard.append(step)
"""


def test_the_configuration_names_backend_extensions_and_observers(
    toy: Path, install: Install
) -> None:
    groups = {
        "extensions": {"loud": "toy_hooks:loud", "broken": "toy_gone:Gone"},
        "observers": {"ear": "toy_hooks:listener"},
    }
    install("rlhf-ears", groups, {"toy_hooks": HOOKS})
    words = ["--extensions", "[loud]", "--observers", "ear"]
    request = read_config("toy", overrides=words)
    hooks, observers = load_hooks(request.config)
    assert hooks.setup_mesh(config=request.config) == "SETUP_MESH"
    observers.on_eval(run=RUN, step=7, metrics={})
    assert load_object("toy_hooks:Listener").heard == [7]
    request = read_config("toy", overrides=["--extensions.loud.end", "AS"])
    assert pickle.loads(pickle.dumps(request.config)) == request.config
    hooks, _ = load_hooks(request.config)
    assert hooks.setup_mesh(config=request.config) == "SETUP_MESHAS"
    with pytest.raises(RLHFError) as caught:
        read_config("toy", overrides=["--extensions.loud.ends", "AS"])
    assert str(caught.value) == (
        "extensions.loud.ends: unknown setting; did you mean extensions.loud.end?"
    )
    with pytest.raises(RLHFError) as caught:
        read_config("toy", overrides=["--extensions", "broken"])
    assert str(caught.value) == (
        "extension 'broken' of rlhf-ears 1.0 cannot be imported: ModuleNotFoundError: "
        "No module named 'toy_gone' (`python -c 'import toy_gone'` shows where)"
    )
    with pytest.raises(RLHFError) as caught:
        read_config("toy", overrides=["--extensions", "lod"])
    assert str(caught.value) == (
        "extension 'lod' is not installed (did you mean 'loud'?); "
        "available: broken (rlhf-ears 1.0), loud (rlhf-ears 1.0)"
    )


def test_a_backend_may_leave_out_what_it_finds_on_this_machine() -> None:
    hooks, _ = build_gateways(backend(without="diagnose"))
    assert hooks.diagnose() == ()
    hooks, _ = build_gateways(backend())
    assert hooks.diagnose()[0] == "diagnose"
