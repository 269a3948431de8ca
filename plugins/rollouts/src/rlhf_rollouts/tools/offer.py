"""What the policy may call, as JSON schemas. The processes of tools do not import this module: it
loads transformers."""

import sys
from collections.abc import Callable
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

from attrs import frozen
from transformers.utils import get_json_schema

from rlhf.errors import RLHFError, first_line
from rlhf_rollouts.settings import Tools
from rlhf_rollouts.tools.loading import GET_REWARD, RESET, load


@frozen
class Offer:
    """What the policy may call, as plain data."""

    schemas: list[dict[str, Any]]
    """JSON schemas, as chat templates get them."""
    methods: frozenset[str]
    """The names of those that belong to the environment."""
    environment: str | None
    """The name of its class."""
    rewards: bool
    """Whether it has the reward of an answer."""
    asynchronous: frozenset[str]
    """Those of its methods and of the functions that are coroutines."""


def offer(settings: Tools) -> Offer:
    """Return what the policy may call. Raises RLHFError as `load` does, and for a tool without the
    docstring or the type hints that a JSON schema needs."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        # Modules there can be imported, after all others, as in the processes of tools.
        sys.path.append(folder)
    loaded = load(settings)
    tools = {**loaded.functions, **loaded.methods}
    if not tools:
        raise RLHFError(f"{settings.environment} has no method that is a tool; add one")
    rewards = callable(getattr(loaded.kind, GET_REWARD, None))
    environment = loaded.kind.__name__ if loaded.kind else None
    schemas = [schema_of(name, tool) for name, tool in tools.items()]
    called = {**tools, **{name: getattr(loaded.kind, name, None) for name in (RESET, GET_REWARD)}}
    asynchronous = frozenset(name for name, it in called.items() if iscoroutinefunction(it))
    return Offer(schemas, frozenset(loaded.methods), environment, rewards, asynchronous)


def schema_of(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool, as transformers makes it, with the name that calls it: a
    decorated method may have another one."""
    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:  # transformers raises several kinds.
        raise RLHFError(
            f"no JSON schema can be made of the tool {name!r}: {first_line(error)}"
        ) from error
    schema["function"]["name"] = name
    return schema
