"""What computes the convolution and the scan of a recurrent layer on CUDA, each where it gives the
values and gradients of transformers' torch function: our kernel for short convolutions,
flash-linear-attention for Gated DeltaNet (Yang et al., arXiv 2412.06464), KDA (arXiv 2510.26692)
and Mamba 2 (Dao and Gu, arXiv 2405.21060)."""

import inspect
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import normalize
from torch.utils._python_dispatch import _disable_current_modes

from rlhf.errors import first_line
from rlhf_kernels.mamba import by_linear_attention
from rlhf_kernels.meta import META_PARTS, MetaConvolution, MetaScan
from rlhf_kernels.paths import CHUNK, ends_of

AGREEMENT, AGREEMENT_FP32 = 2e-2, 2e-5
"""Largest accepted error, as a share of the norm: rounding to bf16 gives 5e-3. In fp32 the start-up
probe accepts less than the rounding of TF32."""
LENGTHS = (100, 150)
"""Of the two sequences that are compared, in one row."""
OFFSETS = (0, *accumulate(LENGTHS))
VARIABLES = {"FLA_CACHE_MODE", "FLA_CONFIG_DIR"}
"""What tells flash-linear-attention where configurations of its kernels (tiles, warps) are."""
TUNED = Path(__file__).with_name("tuned.json")
"""Configurations by kind of device and kernel, by `benchmarks/tuned_configs.py`."""
OF_FLA = ("fla.", "rlhf_kernels.fla_")
"""How the modules begin that run flash-linear-attention."""
INITIAL = {"output_final_state": "initial_state", "return_final_states": "initial_states"}
"""The argument for the initial states, by that which asks for the final ones."""
Values = Mapping[str, Any]
"""The arguments of a scan by the names that the torch function has for them."""


class Library(NamedTuple):
    """Where a convolution or a scan is found, and what installs it."""

    package: str
    install: str
    module: str
    function: str
    what: Literal["convolutions", "scans"] = "scans"
    kept: int = 0
    """Numbers that are kept for each token and head beside inputs and output."""
    form: Callable[..., Any] | None = None
    """What computes the torch function's results by what is found, its first argument."""

    def load(self) -> Callable[..., Any]:
        """Return the function. Raises ImportError if it is not installed."""
        found = load(self.module, self.function)
        return partial(self.form, found) if self.form else found


fla = partial(Library, "flash-linear-attention", "pip install 'rlhf-kernels[fla]'")
LIBRARIES = {
    "causal_conv1d_fn": Library(
        "triton", "pip install triton", "rlhf_kernels.convolution_triton", "convolve",
        what="convolutions",
    ),
    "torch_chunk_gated_delta_rule": fla(
        "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", kept=CHUNK
    ),
    "chunk_kimi_delta_attention": fla("fla.ops.kda", "chunk_kda", kept=2 * CHUNK),
    "mamba2_chunk_scan": fla("rlhf_kernels.fla_parts", "PARTS", form=by_linear_attention),
}  # fmt: skip


@cache
def load(module: str, name: str) -> Any:
    """Return what a module has of a library. Functions are made to ignore the arguments that they
    do not name."""
    if module.startswith(OF_FLA):
        use_tuned_configs()
    found = getattr(import_module(module), name)
    if not callable(found):
        return found
    names = set(inspect.signature(found).parameters)

    def run(*args: Any, **kwargs: Any) -> Any:
        return found(*args, **{name: kwargs[name] for name in kwargs.keys() & names})

    return run


def use_tuned_configs() -> None:
    """Have flash-linear-attention run its kernels in the configurations that were the fastest on a
    device of this kind, unless its variables are set. Else it times all of them at their first use,
    for minutes, machines with such devices may choose others, which round otherwise, and every
    launch looks the choice up by all arguments, which takes a third of the library's time on the
    host."""
    with suppress(ImportError, AttributeError):  # Another version may have no such class.
        tuner: Any = import_module("fla.ops.utils.cache").CachedAutotuner
        if tuner.run.__module__ != __name__:  # Another function may have been loaded before.
            tuner.run = tuned(tuned_configs(), tuner.run)


def tuned_configs() -> Mapping[str, Mapping[str, int]]:
    """Return the configurations that were the fastest on a device of this kind, by kernel."""
    of_nvidia = torch.cuda.is_available() and torch.version.hip is None
    if not of_nvidia or VARIABLES & os.environ.keys():
        return {}
    major, minor = torch.cuda.get_device_capability()
    known: dict[str, Any] = json.loads(TUNED.read_text(encoding="utf-8"))
    return known.get(f"sm{major}{minor}", {})


def tuned(known: Mapping[str, Mapping[str, int]], own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method `run` of the library's tuner with `known` configurations."""

    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        config = known.get(tuner.kernel_name)
        if config is None:
            return own(tuner, *args, **kwargs)
        return tuner.fn.run(*args, **kwargs, **config)

    return run


class Scans:
    """The choice of a library for each kind of scan of a process."""

    def __init__(self) -> None:
        self._problems: dict[Any, str | None] = {}

    def choose(
        self, name: str, own: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any] | None:
        """Return the library's function for arguments like these, whose row is [1, T, ...]; None if
        no installed one gives what `own` gives. It takes a row whole: a scan also takes
        `cu_seqlens` [S + 1], the offsets of sequences in it, a convolution the `links` of its
        tokens."""
        library, device = LIBRARIES[name], args[0].device
        if device.type != "meta":
            problem = self.problem(library, own, args, kwargs, device)
            return None if problem else library.load()
        # A machine without a GPU can rehearse the run of one that has both.
        on_gpu = torch.cuda.is_available()
        if on_gpu and self.problem(library, own, args, kwargs, torch.device("cuda")):
            return None
        if library.form:
            return partial(library.form, META_PARTS)
        stand_in = rehearsed_convolution if library.what == "convolutions" else rehearsed
        return partial(stand_in, own, library.kept)

    def problem(
        self,
        library: Library,
        own: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        device: torch.device,
    ) -> str | None:
        """Return why a scan does not use its library; the first time also as a warning."""
        # All layers ask in every forward.
        shape = args[0].shape
        width = shape[1:2] if library.what == "convolutions" else shape[2:]
        rest = (*args[1:], *kwargs.values())
        key = library, args[0].dtype, width, *kwargs, *map(kind, rest)
        if key not in self._problems:
            values = inspect.signature(own).bind_partial(*args, **kwargs).arguments
            values.pop("kwargs", None)
            # A recomputation of the layer, or a count of its memory, is not of the comparison.
            with _disable_current_modes(), saved_tensors_hooks(_same, _same):
                problem = disagreement(library, own, values, device)
            self._problems[key] = problem
            if problem is not None and os.environ.get("RANK", "0") == "0":
                what = "convolutions" if library.what == "convolutions" else "scans"
                warnings.warn(
                    f"{what} of recurrent layers run in plain torch, since {library.package} "
                    f"{problem}",
                    stacklevel=2,
                )
        return self._problems[key]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def kind(value: Any) -> Any:
    """Return what the choice of a library depends on: of the tensors of a row not its length."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape[2:] or value.shape
    return value if isinstance(value, str | int | float | None) else repr(value)


def disagreement(
    library: Library, own: Callable[..., Any], values: Values, device: torch.device
) -> str | None:
    """Return how a library's values or gradients differ from those of `own`, for two sequences of
    random numbers in the place of `values`, or why it does not run; None if they agree."""
    try:
        run = library.load()
    except ImportError:
        return f"is not installed; run `{library.install}`"
    drawn = random_values(own, values, device)
    generator = torch.Generator(device).manual_seed(1)
    forward: Callable[[Callable[..., Any], Values], Sequence[Tensor]]
    own_forward: Callable[[Callable[..., Any], Values], Sequence[Tensor]]
    if library.what == "convolutions":
        forward, own_forward = convolved, convolved
        weights = [torch.randn(drawn["hidden_states"].shape, generator=generator, device=device)]
    else:
        forward, own_forward = end_to_end, one_by_one
        final = next(name for name in INITIAL if name in inspect.signature(own).parameters)
        drawn |= {final: True, INITIAL[final]: None}
        with torch.no_grad():
            state = one_by_one(own, drawn)[1]
        weights = [
            torch.randn(shape, generator=generator, device=device)
            for shape in ((1, OFFSETS[-1], 1, 1), state.shape)
        ]
        drawn[INITIAL[final]] = normalize(weights[1], dim=-1).to(state.dtype)
    try:
        theirs = values_and_gradients(partial(forward, run), drawn, weights)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # No such kernel for this device or version: each raises its own.
        return f"does not run here: {first_line(error)}"
    ours = values_and_gradients(partial(own_forward, own), drawn, weights)
    errors = [(a - b).norm() / b.norm() for a, b in zip(theirs, ours, strict=True)]
    largest = float(torch.stack(errors).max())
    in_fp32 = next(iter(drawn.values())).dtype == torch.float32
    accepted = AGREEMENT_FP32 if in_fp32 else AGREEMENT
    return None if largest < accepted else f"differs by {largest:.1e} of the norm"


def random_values(own: Callable[..., Any], values: Values, device: torch.device) -> dict[str, Any]:
    """Return random numbers of the kinds of `values` in the ranges that their names mean, in the
    order of the parameters of `own`: vectors of unit length, decays below 0, rates from 0 to 1."""
    generator = torch.Generator(device).manual_seed(0)
    drawn: dict[str, Any] = {}
    for name in inspect.signature(own).parameters:
        value = values.get(name)
        if not isinstance(value, Tensor):
            if name in values:
                drawn[name] = value
            continue
        shape = (1, OFFSETS[-1], *value.shape[2:]) if value.dim() > 2 else value.shape
        if name == "hidden_states" and value.dim() == 3:  # The row of a convolution.
            shape = (1, value.shape[1], OFFSETS[-1])
        numbers = torch.randn(shape, generator=generator, device=device)
        if name in ("g", "A"):
            numbers = -numbers.abs() / 8
        elif name == "beta":
            numbers = numbers.sigmoid()
        elif numbers.dim() == 4:
            numbers = normalize(numbers, dim=-1)
        drawn[name] = numbers.to(value.dtype)
    return drawn


def convolved(run: Callable[..., Any], values: Values) -> tuple[Tensor]:
    """Return the output of a convolution."""
    return (call(run, values),)


def end_to_end(run: Callable[..., Any], values: Values) -> tuple[Tensor, Tensor]:
    """Return outputs and final states of both sequences by one call."""
    device = next(iter(values.values())).device
    ends = {name: torch.tensor(one, device=device) for name, one in ends_of(LENGTHS).items()}
    return call(run, {**values, **ends})


def one_by_one(run: Callable[..., Any], values: Values) -> tuple[Tensor, Tensor]:
    """Return outputs and final states of both sequences by a call for each."""
    outputs, states = [], []
    for number, start in enumerate(OFFSETS[:-1]):
        part = {}
        for name, value in values.items():
            part[name] = value
            if isinstance(value, Tensor) and value.dim() > 2:
                part[name] = (
                    value[number, None]
                    if name in INITIAL.values()
                    else value[:, start : OFFSETS[number + 1]]
                )
        output, state = call(run, part)
        outputs.append(output)
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states)


def call(run: Callable[..., Any], values: Values) -> Any:
    """Run a scan with its first three arguments by position: libraries name them otherwise."""
    names = list(values)
    return run(*(values[name] for name in names[:3]), **{name: values[name] for name in names[3:]})


def values_and_gradients(
    forward: Callable[[Values], Sequence[Tensor]], values: Values, weights: Sequence[Tensor]
) -> list[Tensor]:
    """Return the results and the gradients of their weighted sum, in float32."""
    with torch.enable_grad():
        leaves = {
            name: value.detach().requires_grad_()
            for name, value in values.items()
            if isinstance(value, Tensor)
        }
        results = forward({**values, **leaves})
        pairs = zip(results, weights, strict=True)
        total = torch.stack([(one.float() * weight).sum() for one, weight in pairs]).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()))
    return [one.detach().float() for one in (*results, *gradients)]


def rehearsed_convolution(
    own: Callable[..., Any], kept: int, states: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Run a library's convolution on the meta device."""
    output: Tensor = MetaConvolution.apply(states, weight)
    return output


def rehearsed(
    own: Callable[..., Any], kept: int, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Run a library's scan on the meta device: `own` computes the first token of each row, which
    has the shapes of the results."""
    rows, length = args[0].shape[:2]
    num_states, num_chunks = (len(kwargs.pop(name)) for name in ("cu_seqlens", "chunk_indices"))

    def first(value: Any) -> Any:
        of_row = isinstance(value, Tensor) and value.dim() > 2 and value.shape[:2] == (rows, length)
        return value[:, :1] if of_row else value

    named = {
        name: None if name in INITIAL.values() else first(value) for name, value in kwargs.items()
    }
    named |= {name: True for name in INITIAL if name in kwargs}
    with torch.no_grad():
        output, state = own(*map(first, args), **named)
    inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    found: tuple[Tensor, Tensor] = MetaScan.apply(
        output.new_empty(rows, length, *output.shape[2:]),
        state.new_empty(num_states - 1, *state.shape[1:]),
        kept, output.new_empty(num_chunks, *state.shape[1:]), *inputs,
    )  # fmt: skip
    return found
