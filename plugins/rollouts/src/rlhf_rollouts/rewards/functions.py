"""A reward function: found by its name, its signature checked, and called as TRL calls it."""

import functools
import importlib
import importlib.util
import inspect
import json
import math
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

from attrs import field, frozen

from rlhf.errors import RLHFError, first_line, listed
from rlhf_rollouts.rewards import rules
from rlhf_rollouts.rewards.spec import RULES

TEXTS = ("prompts", "completions", "completion_ids")
COMMON = (*TEXTS, "trainer_state", "log_extra", "log_metric")
"""The keywords of every call; further ones are columns of the rows."""
NOT_OWN = (
    *("<", str(Path(__file__).parents[1])),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)
"""What the names of files begin with that are not the user's: of Python, of packages and ours."""
ANSWER = "\0"
"""Stands for the answer in the text of an outcome."""
CALL = "\1"
"""Stands for the answers of the call."""


@frozen
class Function:
    """A function with its options."""

    call: Callable[..., Any]
    options: Mapping[str, Any]
    keywords: frozenset[str] | None
    """The keywords that it takes; None if it takes all."""
    columns: tuple[str, ...]
    """The columns of the rows that it needs."""
    is_async: bool


@frozen
class Call:
    """Answers that a function scores in one call."""

    function: int
    """The place of the function in the list of all."""
    places: Sequence[int]
    """The places of the answers in the rollout."""
    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]


@frozen(kw_only=True)
class Outcome:
    """The result of a call: its values, or why there are none."""

    kind: Literal["scored", "failed", "late"] = "scored"
    """late: it did not return before the deadline."""
    values: Sequence[float] = ()
    """nan where the function returned None."""
    extras: Mapping[str, Sequence[Any]] = field(factory=dict)
    metrics: Mapping[str, float] = field(factory=dict)
    text: str = ""
    """Why it has failed."""
    place: int = 0
    """The answer of the call that ANSWER in `text` stands for."""
    trace: str = ""
    """The traceback of what the function raised."""


def load(path: str, options: Mapping[str, Any]) -> Function:
    """Return the function that `path` names. Raises RLHFError if it cannot be found, or cannot be
    called with `options` and the keywords of every call."""
    is_rule = path in RULES
    call = getattr(rules, path) if is_rule else find(path)
    parameters = inspect.signature(call).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if not takes_all and not {*TEXTS} & {each.name for each in parameters}:
        raise RLHFError(f"takes none of {', '.join(TEXTS)}; add the parameter completions")
    own = {
        each.name: each.default for each in parameters
        if each.name not in COMMON and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    }  # fmt: skip
    for name in options:
        if name in COMMON or (name not in own and (is_rule or not takes_all)):
            raise RLHFError(f"has no option {name!r}; available: {', '.join(own) or 'none'}")
    required = [name for name in own if own[name] is inspect.Parameter.empty]
    needed = tuple(name for name in required if name not in options)
    # An object is called by the method of its class.
    by_class = getattr(type(call), "__call__")  # noqa: B004, B009
    is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(by_class)
    if not is_rule:
        keywords = None if takes_all else frozenset(each.name for each in parameters)
        return Function(call, options, keywords, needed, is_async)
    if needed:
        raise RLHFError(f"needs the option {needed[0]!r}; set it in `options`")
    # The parameters of a rule are options, not columns.
    columns = (str(options.get("column", own["column"])),) if "column" in own else ()
    nothing: dict[str, Any] = {name: [] for name in (*TEXTS, *columns)}
    # It checks its options before it scores anything.
    call(**nothing, **options)
    return Function(call, options, frozenset({*TEXTS, *columns, *options}), columns, is_async)


def find(path: str, kind: str = "function") -> Callable[..., Any]:
    """Return what `module:name` or `file.py:name` names: a function, or a `kind` that can be called
    like one."""
    source, _, name = path.rpartition(":")
    read = module_of if source.endswith(".py") else importlib.import_module
    try:
        module = read(source)
    except RLHFError:
        raise
    except (Exception, SystemExit) as error:  # A module of the user may raise anything.
        raise RLHFError(f"{source} cannot be imported: {described(error)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        is_kind = inspect.isclass if kind == "class" else inspect.isfunction
        names = [key for key, value in vars(module).items() if is_kind(value)]
        raise RLHFError(f"{source} has no {kind} {name!r}; available: {listed(names) or 'none'}")
    return found


@functools.cache
def module_of(source: str) -> ModuleType:
    """Import a file. Modules in its folder can be imported, after all others."""
    file = Path(source).expanduser().resolve()
    if not file.is_file():
        raise RLHFError(f"{file} does not exist; correct the path")
    sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"rewards_in_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look for their module here.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def described(error: BaseException) -> str:
    """Return the type and the first line of an error, and the last line of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(NOT_OWN)]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {first_line(error)}{where}"


@frozen
class Log:
    """What a function logs during one call that scores `count` answers."""

    count: int
    extras: dict[str, list[Any]] = field(factory=dict)
    metrics: dict[str, list[float]] = field(factory=dict)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Keep a column for the table of answers, as plain data."""
        if len(values) != self.count:
            raise RLHFError(
                f"logged {len(values)} values of {column!r} for {CALL}; log one for each"
            )
        self.extras[column] = json.loads(json.dumps([*values], default=plain))

    def metric(self, name: str, value: Any) -> None:
        """Keep a number; several of one call are averaged."""
        self.metrics.setdefault(name, []).append(float(value))

    def outcome(self, values: Any) -> Outcome:
        """Return the outcome of a call that has returned `values`."""
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
            raise RLHFError(
                f"returned {shown(values)} for {CALL}; return a list with a number or None for "
                "each answer"
            )
        values = [*values]
        if len(values) != self.count:
            raise RLHFError(
                f"returned a list of {len(values)} for {CALL}; return one value for each"
            )
        numbers = [math.nan if value is None else number(value) for value in values]
        for place, (value, result) in enumerate(zip(values, numbers, strict=True)):
            if value is not None and not math.isfinite(result):
                text = (
                    f"returned {shown(value)} for {ANSWER}; return a finite number, or None for an "
                    "answer that it cannot score"
                )
                return Outcome(kind="failed", text=text, place=place)
        means = {name: sum(each) / len(each) for name, each in self.metrics.items()}
        return Outcome(values=numbers, extras=self.extras, metrics=means)


def arguments(call: Call, function: Function, state: Mapping[str, Any], log: Log) -> dict[str, Any]:
    """Return the keywords of a call, of which the function gets those that it takes."""
    given = {
        **call.columns,
        "prompts": call.prompts, "completions": call.completions,
        "completion_ids": call.completion_ids, "trainer_state": SimpleNamespace(**state),
        "log_extra": log.extra, "log_metric": log.metric, **function.options,
    }  # fmt: skip
    names = given if function.keywords is None else function.keywords & given.keys()
    return {name: given[name] for name in names}


def failed(error: BaseException) -> Outcome:
    """Return the outcome of a call that has raised `error`."""
    if isinstance(error, RLHFError):
        return Outcome(kind="failed", text=str(error))
    text = (
        f"raised {described(error)} for {ANSWER}; correct the function, or return None for an "
        "answer that it cannot score"
    )
    trace = "".join(traceback.format_exception(error))
    return Outcome(kind="failed", text=text, trace=trace)


def number(value: Any) -> float:
    """Return a number, also of numpy or torch, as a float; nan for anything else."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def plain(value: Any) -> Any:
    """Return an array or a scalar of numpy or torch as lists and numbers, other objects as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def shown(value: Any) -> str:
    """Return a value as errors show it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
