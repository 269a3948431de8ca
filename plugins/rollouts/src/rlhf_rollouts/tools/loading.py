"""What a run's settings name as tools: functions, and the methods of an environment."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from rlhf.errors import RLHFError
from rlhf_rollouts.rewards.functions import described, find
from rlhf_rollouts.settings import Tools

RESET, GET_REWARD = "reset", "get_reward"
"""Methods of an environment that are not tools."""


@frozen
class Loaded:
    """The tools of a run."""

    functions: Mapping[str, Callable[..., Any]]
    """Functions by name."""
    make: Callable[[], Any] | None = None
    """Makes an environment; None if there is none."""
    kind: type | None = None
    """The class of environments."""

    @property
    def methods(self) -> dict[str, Callable[..., Any]]:
        """The tools of the environment by name, in alphabetical order, as in TRL."""
        if self.kind is None:
            return {}
        members = inspect.getmembers(self.kind, predicate=inspect.isfunction)
        return {
            name: method for name, method in members
            if name not in (RESET, GET_REWARD) and not name.startswith("_")
        }  # fmt: skip


def load(settings: Tools) -> Loaded:
    """Return what the settings name. Raises RLHFError for what cannot be found or is not a tool."""
    functions: dict[str, Callable[..., Any]] = {}
    for path in settings.functions:
        function = find(path)
        name = getattr(function, "__name__", path.rpartition(":")[2])
        if name in functions:
            raise RLHFError(f"two tools are called {name!r}; rename one")
        functions[name] = function
    if settings.environment is None:
        return Loaded(functions)
    make = find(settings.environment, "class")
    loaded = Loaded(functions, make, make if inspect.isclass(make) else type(made(make)))
    name = loaded.kind.__name__ if loaded.kind else ""
    if not callable(getattr(loaded.kind, RESET, None)):
        raise RLHFError(f"{name} has no method reset, which begins an episode; add it")
    for both in functions.keys() & loaded.methods.keys():
        raise RLHFError(f"a function and a method of {name} are both called {both!r}; rename one")
    return loaded


def made(make: Callable[[], Any]) -> Any:
    """Return an environment. Raises RLHFError if that fails."""
    try:
        return make()
    except (Exception, SystemExit) as error:  # Code of the user may raise anything.
        raise RLHFError(f"the environment cannot be made: {described(error)}") from error
