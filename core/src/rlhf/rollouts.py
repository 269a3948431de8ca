"""What the module of a generation engine imports, which is found under the entry-point group
`rlhf.rollouts`."""

from collections.abc import Callable, Sequence
from typing import Protocol

from rlhf.config.field_docs import documented
from rlhf.config.sections import Config
from rlhf.data.layout import groups_by_length
from rlhf.engine import Engine
from rlhf.errors import RLHFError
from rlhf.model.weights import quiet_transformers
from rlhf.registry.imports import load_object, load_record
from rlhf.registry.installed import Installed, find
from rlhf.trainer import Sample

__all__ = ["RolloutEngine", "groups_by_length", "quiet_transformers"]


@documented
class RolloutEngine(Protocol):
    """What writes answers. On every rank the class is created before its first answer, with the
    keywords `config` (a `Config`), `tokenizer`, `mesh` (a `Mesh`) and `hooks` (`BackendHooks`)."""

    def sample(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int],
        max_new_tokens: int,
        max_tokens: int,
        ends: Sequence[int],
        temperature: float,
    ) -> list[Sample]:
        """Return an answer to each prompt (token ids), in the same order, drawn from the whole
        distribution of the model in `engine` at `temperature`; at 0 each token is the most likely
        one.

        An answer ends with one of `ends`, after `max_new_tokens` tokens, or when it has
        `max_tokens` tokens with its prompt, but has at least one. It depends only on its prompt and
        its seed, up to rounding. Collective: every rank passes the same and gets all answers."""


def find_engine(config: Config) -> Installed:
    """Return the engine that the configuration names. Raises RLHFError if its record cannot be
    loaded."""
    plugin = find("rollouts", config.rollouts.engine)
    load_record(plugin)
    return plugin


def load_engine(plugin: Installed) -> Callable[..., RolloutEngine]:
    """Return the class of an engine. Raises RLHFError if it does not define `sample`."""
    path = load_record(plugin).engine
    engine: Callable[..., RolloutEngine] = load_object(path, plugin)
    if not hasattr(engine, "sample"):
        raise RLHFError(f"{plugin}: {path} does not define sample")
    return engine
