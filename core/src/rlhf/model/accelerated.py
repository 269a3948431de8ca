"""The one door to fused and compiled layers, attention and readouts: the distribution found under
`rlhf.kernels`. Without one, everything runs in plain torch."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlhf.config.field_docs import documented
from rlhf.config.sections import ModelConfig, Recompute
from rlhf.devices import fused_on
from rlhf.engine import Axis
from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf.hookspecs import Finding
from rlhf.model.masks import Scoring, Tree, TreeMask
from rlhf.registry.imports import load_object, load_record
from rlhf.registry.installed import Installed, find_kernels, known_plugins


@documented
class RowKernel(Protocol):
    """Attention of one packed row under the mask of its trees."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, scoring: Scoring
    ) -> Tensor:
        """Compute attention: query [1, heads, T, C], key [1, KV heads, T, C] and value [1, KV
        heads, T, D] -> [1, heads, T, D]. On the meta device nothing is computed, and as much is
        kept for backward."""


@documented
class Kernels(Protocol):
    """What a distribution of kernels implements. The class is created once per process. It may have
    more methods, which readouts of other distributions get from `rlhf.readouts.kernel`."""

    def check(self, architecture: Any, model: ModelConfig, device: torch.device) -> None:
        """Raise RLHFError if a model of transformers' `architecture` on `device` cannot run what
        `model.kernels`, `model.fp8` or `model.recompute` asks for."""

    def loading(self) -> AbstractContextManager[None]:
        """Have transformers copy weights to an accelerator faster in the body, which loads a
        model."""

    def change(
        self, decoder: Any, model: ModelConfig, device: torch.device, towers: Sequence[nn.Module]
    ) -> str:
        """Change in place the layers of a loaded decoder, except for what `compile` does later, and
        of the `towers` beside it; return one line on what was done, or nothing."""

    def rehearse(self, decoder: Any, model: ModelConfig) -> None:
        """Change the layers of a decoder on the meta device so that it keeps for backward what the
        real one keeps, also a compiled one. Raises RLHFError as `check` does for
        `model.recompute`."""

    def fuse_adapters(self, model: nn.Module, settings: ModelConfig, device: torch.device) -> None:
        """Have adapters of LoRA run fused, where that is possible."""

    def compile(self, decoder: Any, recipe: str | None) -> str:
        """Compile the layers of a decoder, with products in FP8 by this `recipe` unless it is None;
        return one line on what was done. Called after the start-up probe."""

    def row(self, tree: Tree, *, windowed: bool) -> RowKernel:
        """Return what computes attention of a row, in layers with or without a window. Called
        outside of the layers, which may be compiled or recomputed."""

    def computes_trees(self, model: Any) -> bool:
        """Return whether the recurrent layers of a transformers model can compute trees, on any
        device."""

    def run_trees(self, model: Any) -> Callable[[Tree], Any]:
        """Have those layers compute trees; may be repeated. Returns what makes of the trees of a
        row the decoder's `seq_idx`. On the meta device nothing is computed, and as much is kept for
        backward."""

    def rehearsing(self) -> AbstractContextManager[Collection[Any]]:
        """Note the kinds of attention that rows on the meta device have in the body, as picklable
        values for `compile_ahead`."""

    def compile_ahead(self, kinds: Collection[Any], device: torch.device) -> None:
        """Begin to compile, in threads, what rows with these kinds of attention need."""

    def read_rows(
        self, logits: Tensor, targets: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """Return normaliser, log-probability of the target, entropy and whether the target is the
        most likely token: [4, n] in float32, of raw logits [n, V]."""

    def logit_gradient_(
        self,
        logits: Tensor,
        targets: Tensor,
        normaliser: Tensor,
        gradient: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Overwrite logits [n, V] with their gradient, given the `gradient` [n] for the targets'
        log-probabilities, and return them."""

    def diagnose(self) -> Sequence[Finding]:
        """Return what `rlhf doctor` shows."""


@cache
def installed_kernels() -> Kernels | None:
    """Return the installed kernels, for any device; None if there are none. Raises RLHFError if
    they cannot be loaded."""
    plugin = find_kernels()
    return None if plugin is None else load_kernels(plugin)


def load_kernels(plugin: Installed) -> Kernels:
    """Return the kernels of a plugin. Raises RLHFError if a method is missing."""
    path = load_record(plugin).kernels
    loaded = load_object(path, plugin)
    names = (name for name in vars(Kernels) if not name.startswith("_"))
    if missing := [name for name in names if not hasattr(loaded, name)]:
        raise RLHFError(f"{plugin}: {path} does not define {', '.join(missing)}")
    made: Kernels = loaded()
    return made


def needed_kernels(model: ModelConfig) -> Kernels | None:
    """Return the installed kernels. Raises RLHFError if `model` needs some and there are none."""
    kernels = installed_kernels()
    needs = {
        setting(model): compiles(model),
        "model.kernels liger": model.kernels == "liger",
        "model.recompute selective": model.recompute == "selective",
    }
    if kernels is None and (name := next((name for name, needed in needs.items() if needed), "")):
        package = known_plugins("kernels")["triton"]
        raise RLHFError(f"{name} needs kernels; run `pip install {package}`, or remove {name}")
    return kernels


def kernels_on(device: torch.device) -> Kernels | None:
    """Return the kernels that run on a device; None if it computes in plain torch."""
    return installed_kernels() if fused_on(device.type) else None


def kernel(name: str, device: torch.device) -> Callable[..., Any] | None:
    """Return the method `name` of the kernels that run on a device; None if there is none, so that
    its caller computes in plain torch."""
    return getattr(kernels_on(device), name, None)


def advice(device: torch.device) -> list[str]:
    """Return what the first lines of a run say if kernels could run on its device and none are
    installed."""
    if not fused_on(device.type) or installed_kernels() is not None:
        return []
    return [
        "kernels    none, so that layers run in plain torch: run "
        f"`pip install {known_plugins('kernels')['triton']}` for the fused ones"
    ]


@contextmanager
def rehearsed_attention() -> Iterator[Collection[Any]]:
    """Note the kinds of attention that are rehearsed in the body, for `compile_ahead`."""
    kernels = installed_kernels()
    if kernels is None:
        yield ()
        return
    with kernels.rehearsing() as kinds:
        yield kinds


def check_packed(
    path: str, reason: str, model: ModelConfig, sequence: Axis, recurrent: Sequence[str] = ()
) -> None:
    """Raise RLHFError if layers are compiled or ranks divide rows, although `path` has no packed
    row, for this `reason`, or layers of these `recurrent` types carry a state along it."""
    if path in ("tree", "packed"):
        layers = f"recurrent layers ({', '.join(recurrent)})"
        if recurrent and compiles(model):
            raise RLHFError(f"{setting(model)} cannot compile {layers}; remove {setting(model)}")
        if recurrent and sequence.size > 1:
            raise SameOnAllRanks(
                f"sequence ranks cannot divide the state of {layers}; set sequence_parallel to 1"
            )
        return
    runs = f"packed rows, but this model runs on the path '{path}' ({reason})"
    if compiles(model):
        raise RLHFError(f"{setting(model)} needs {runs}; remove {setting(model)}")
    if sequence.size > 1:
        raise SameOnAllRanks(f"sequence ranks divide {runs}; set sequence_parallel to 1")


def compiles(model: ModelConfig) -> bool:
    """Return whether layers are compiled; products in FP8 are slow otherwise."""
    return model.kernels == "compile" or model.fp8 is not None


def setting(model: ModelConfig) -> str:
    """Return the setting that asks for compiled layers."""
    return "model.kernels compile" if model.fp8 is None else "model.fp8"


def recompute_levels(model: ModelConfig) -> list[Recompute]:
    """Return the levels of `model.recompute` that a run may choose, the cheaper ones first."""
    # A compiler decides by itself what it keeps of a layer.
    return ["full"] if compiles(model) or installed_kernels() is None else ["selective", "full"]
