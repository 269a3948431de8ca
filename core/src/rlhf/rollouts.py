"""What the module of a generation engine imports, which is found under the entry-point group
`rlhf.rollouts`, and what writes rollouts into run folders."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from rlhf.config.field_docs import documented
from rlhf.config.sections import Config
from rlhf.data.layout import groups_by_length
from rlhf.data.packing import pack
from rlhf.engine import Engine
from rlhf.errors import RLHFError
from rlhf.folder.disk import new_file
from rlhf.folder.run_folder import HELD_OUT, ROLLOUTS
from rlhf.hookspecs import BackendHooks
from rlhf.model.attention import tree_attention, tree_mask
from rlhf.model.packed import PREFIX
from rlhf.model.save import buckets_of, exported_bucket, exported_shapes, without_values
from rlhf.model.weights import quiet_transformers
from rlhf.registry.imports import load_object, load_record
from rlhf.registry.installed import Installed, find
from rlhf.trainer import Sample

__all__ = [
    "HELD_OUT",
    "ROLLOUTS",
    "RolloutEngine",
    "exported_weights",
    "find_engine",
    "groups_by_length",
    "load_engine",
    "new_file",
    "pack",
    "quiet_transformers",
    "tree_attention",
    "tree_mask",
]


@documented
class RolloutEngine(Protocol):
    """What writes answers. On every rank the class is created before its first answer, with the
    keywords `config` (a `Config`), `tokenizer`, `mesh` (a `Mesh`) and `hooks` (`BackendHooks`). It
    may have a list `notes`: the run prints the lines that `sample` appends to it. It may have a
    dict `metrics`, to whose numbers `sample` adds: `Run.engine_metrics`.

    It may have a method `begin` with the arguments of `sample`, which returns a function, called
    once, that waits for the answers: with `rollouts.lag: 1` the run trains in between, and calls no
    other method of the engine. Both are collective."""

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
        inputs: Sequence[Mapping[str, Any]] = (),
    ) -> list[Sample]:
        """Return an answer to each prompt (token ids), in the same order, drawn from the whole
        distribution of the model in `engine` at `temperature`; at 0 each token is the most likely
        one.

        An answer ends with one of `ends`, after `max_new_tokens` tokens, or when it has
        `max_tokens` tokens with its prompt, but has at least one. It depends only on its prompt and
        its seed, up to rounding. Only in data with images, and of an engine whose record says
        `images`, `inputs` has the keyword arguments of the model for each prompt, as
        `Example.inputs`. Collective: every rank passes the same and gets all answers."""


def exported_weights(
    engine: Engine, hooks: BackendHooks, *, size: int
) -> Iterator[dict[str, Tensor]]:
    """Yield the weights of an engine's model, or of its adapter if it has one, by the names that
    its exported folder gives them, in buckets of at most `size` bytes or one weight, on the device
    of every rank until the next bucket is taken. Every rank takes all buckets. Collective."""
    module = engine.module
    buckets, values = [*buckets_of(module, size)], without_values(module)
    parts = [_of_model(module, {name: values[name] for name in names}) for names in buckets]
    shapes = {name: tuple(value.shape) for part in parts for name, value in part.items()}
    if shapes != exported_shapes(module.model):
        # A family's export makes one weight of several.
        buckets = [[name for names in buckets for name in names]]
    for bucket in hooks.weights(engine=engine, buckets=buckets):
        yield _of_model(module, bucket)


def _of_model(module: Any, bucket: Mapping[str, Tensor]) -> dict[str, Tensor]:
    own = {n.removeprefix(PREFIX): value for n, value in bucket.items() if n.startswith(PREFIX)}
    return exported_bucket(module.model, own)


def find_engine(config: Config) -> Installed:
    """Return the engine that the configuration names, or the one that replays a run. Raises
    RLHFError if its record cannot be loaded."""
    replayed = config.rollouts.replay is not None
    plugin = find("rollouts", "recorded" if replayed else config.rollouts.engine)
    load_record(plugin)
    return plugin


def load_engine(plugin: Installed) -> Callable[..., RolloutEngine]:
    """Return the class of an engine. Raises RLHFError if it does not define `sample`."""
    path = load_record(plugin).engine
    engine: Callable[..., RolloutEngine] = load_object(path, plugin)
    if not hasattr(engine, "sample"):
        raise RLHFError(f"{plugin}: {path} does not define sample")
    return engine
