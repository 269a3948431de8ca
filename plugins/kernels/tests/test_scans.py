"""Scans of recurrent layers by a library, with stand-ins for the libraries on the CPU."""

import importlib
import inspect
import os
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from rlhf.data.packing import blank_batch
from rlhf.model.accelerated import installed_kernels
from rlhf.model.packed import PackedModel
from rlhf.readouts import token_logprobs
from rlhf_devkit.families import FAMILIES, gradients, tree_batch
from rlhf_kernels import recurrent, scans
from rlhf_kernels.mamba import LOG2_E, Parts, by_linear_attention
from rlhf_kernels.meta import META_PARTS
from rlhf_kernels.paths import ends_of
from rlhf_kernels.scans import INITIAL, LIBRARIES, Scans

NAMES = ("Qwen3.5", "Kimi Linear", "Bamba")
Function = Callable[..., Any]
SAID = "of recurrent layers run in plain torch"


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], Function]], None]:
    """A function that replaces the libraries by what it is given, which takes the name of their
    function."""

    def replaced(made: Callable[[str], Function]) -> None:
        monkeypatch.setattr(installed_kernels(), "scans", Scans())
        monkeypatch.setattr(recurrent, "fused_on", lambda kind: True)
        monkeypatch.setattr(scans, "load", lambda module, name: made(name))

    return replaced


def module_of(name: str) -> PackedModel:
    config, options = FAMILIES[name]
    torch.manual_seed(0)
    built = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**options))
    return PackedModel(built).train()


def own_of(module: PackedModel, function: str) -> Function:
    """The torch function in the place of a library's, with its form of arguments and results."""
    name = next(name for name, library in LIBRARIES.items() if library.function == function)
    found = next(
        vars(code)[name] for code in recurrent.code_of(module.causal) if name in vars(code)
    )
    while found.__module__ == recurrent.__name__:
        found = inspect.getclosurevars(found).nonlocals["own"]
    return inspect.unwrap(found)


def values(module: PackedModel) -> tuple[Tensor, dict[str, Tensor]]:
    module.zero_grad()
    found = module(tree_batch(), token_logprobs)["logprobs"]
    found.sum().backward()
    return found.detach(), {name: one.clone() for name, one in gradients(module.causal).items()}


def not_there(function: str) -> Function:
    raise ImportError(function)


def library(module: PackedModel, function: str, sizes: list[int]) -> Function:
    """A library that runs the torch function for each sequence of a row; it notes the tokens of
    each call. The kernel of convolutions runs as it is."""
    if function == "convolve":
        return importlib.import_module("rlhf_kernels.convolution_triton").convolve
    if function == "PARTS":
        return parts_of_torch(sizes)
    own = own_of(module, function)

    def run(
        *args: Any,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        sizes.append(args[0].shape[:2].numel())
        if cu_seqlens is None:
            return own(*args, **kwargs)
        if chunk_indices is not None:
            # As flash-linear-attention computes them.
            lengths = cu_seqlens.diff().tolist()
            assert chunk_indices.tolist() == [
                [number, chunk]
                for number, length in enumerate(lengths)
                for chunk in range(-(-length // 64))
            ]
        [initial] = INITIAL.values() & kwargs.keys()
        first, found = kwargs.pop(initial), []
        for number, ends in enumerate(pairwise(cu_seqlens.tolist())):
            cut = slice(*ends)
            found.append(
                own(
                    *(one[:, cut] for one in args),
                    **{
                        name: one[:, cut] if isinstance(one, Tensor) else one
                        for name, one in kwargs.items()
                    },
                    **{initial: None if first is None else first[number, None]},
                )
            )
        outputs, states = zip(*found, strict=True)
        return torch.cat(outputs, 1), None if states[0] is None else torch.cat(states)

    return run


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gated linear attention by its recurrence, for logarithms g of decays; states are
    [S, H, P, N]."""
    ends = [0, v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [], []
    for number, (start, end) in enumerate(pairwise(ends)):
        state = v.new_zeros(*v.shape[2:], k.shape[-1]) if h0 is None else h0[number]
        for token in range(start, end):
            added = v[0, token, :, :, None] * k[0, token, :, None]
            state = g[0, token, :, None, None].exp() * state + added
            outputs.append((state @ q[0, token, :, :, None]).squeeze(-1))
        states.append(state)
    return torch.stack(outputs)[None], torch.stack(states)


def parts_of_torch(sizes: list[int]) -> Parts:
    """The parts of linear attention by its recurrence and autograd. What stands for the states
    before chunks are those at the start of sequences, and for their gradients those of the last
    ones; sums are the logarithms of decays themselves. It notes the tokens of each output."""

    def sums(g: Tensor, **options: Any) -> Tensor:
        reverse = options.pop("reverse", False)
        assert options.pop("scale", None) == (None if reverse else LOG2_E)
        assert options.keys() == {"chunk_size", "cu_seqlens", "chunk_indices"}
        return g.clone()

    def states(*, k: Tensor, v: Tensor, g: Tensor, h0: Any, **options: Any) -> Any:
        checked(options, {"output_final_state", "states_in_fp32"})
        _, final = linear_attention(k, k, v, g, h0, options["cu_seqlens"])
        return h0, final if options["output_final_state"] else None

    def output(*, q: Tensor, k: Tensor, v: Tensor, h: Any, g: Tensor, **options: Any) -> Tensor:
        checked(options, {"scale"})
        sizes.append(v.shape[1])
        return linear_attention(q, k, v, g, h, options["cu_seqlens"])[0]

    def for_states(*, dht: Any, h0: Any, states_in_fp32: bool, **inputs: Any) -> Any:
        assert not states_in_fp32
        assert dht is None or dht.is_contiguous()  # The library's kernel takes no strides.
        changes = gradients_of(**inputs, h0=h0, final=dht)
        return dht, None if h0 is None else changes[4]

    def for_inputs(*, h: Any, dh: Any, **inputs: Any) -> Any:
        changes = gradients_of(**inputs, h0=h, final=dh)
        return *changes[:2], None, changes[3]

    def for_values(*, dh: Any, do: Tensor, **inputs: Any) -> Tensor:
        # They depend neither on values nor on the states before.
        return gradients_of(**inputs, do=do, v=torch.zeros_like(do), h0=None, final=dh)[2]

    def gradients_of(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> list[Tensor]:
        h0, do, final = (options.pop(name) for name in ("h0", "do", "final"))
        checked(options, {"scale"})
        given = (q, k, v, g, *(() if h0 is None else (h0,)))
        leaves = [one.detach().requires_grad_() for one in given]
        with torch.enable_grad():
            start = None if h0 is None else leaves[4]
            results = linear_attention(*leaves[:4], start, options["cu_seqlens"])
        of_results = (do, torch.zeros_like(results[1]) if final is None else final)
        return list(torch.autograd.grad(results, leaves, of_results))

    def checked(options: Any, names: set[str]) -> None:
        common = {"chunk_size", "state_v_first", "cu_seqlens", "chunk_indices"}
        assert options.keys() == common | names
        assert options["state_v_first"]
        assert options["chunk_size"] == 64
        assert options.get("scale", 1.0) == 1.0
        assert not options.get("states_in_fp32", False)

    return Parts(sums, states, output, for_states, for_inputs, for_values)


@pytest.mark.parametrize("name", NAMES)
def test_a_library_computes_trees_as_torch_does(name: str, use: Any) -> None:
    module = module_of(name)
    use(not_there)
    with pytest.warns(UserWarning, match=SAID):
        ours = values(module)
    sizes: list[int] = []
    use(lambda function: library(module, function, sizes))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs = values(module)
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=5e-5)
    # The last two calls are of the trees: those that start a path, and the answers.
    assert sum(sizes[-2:]) == len(tree_batch().tokens)


@pytest.mark.parametrize("name", NAMES)
def test_states_are_asked_of_a_library_only_where_answers_begin(name: str, use: Any) -> None:
    module = module_of(name).eval()
    asked: list[bool] = []

    def noted(run: Function) -> Function:
        def read(*args: Any, **kwargs: Any) -> Any:
            asked.append(kwargs["output_final_state"])
            return run(*args, **kwargs)

        return read

    def made(function: str) -> Function:
        found: Any = library(module, function, [])
        if function == "PARTS":
            return found._replace(states=noted(found.states))
        return found if function == "convolve" else noted(found)

    use(made)
    tokens = torch.arange(3, 13)
    for spans, expected in ((((4, (3, 3)),), [True, False]), (((6, (4,)),), [False])):
        with torch.no_grad():
            module.hidden(blank_batch(tokens, spans))
            asked.clear()
            module.hidden(blank_batch(tokens, spans))
        assert asked[: len(expected)] == expected


def scaled(own: Function) -> Function:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        return (2 * result[0], result[1]) if isinstance(result, tuple) else 2 * result

    return run


def raising(own: Function) -> Function:
    def run(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel for this device\nand more")

    return run


def raising_in_backward(own: Function) -> Function:
    def refuse(gradient: Tensor) -> None:
        raise RuntimeError("wrong results on this device")

    def run(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        if output.requires_grad:
            output.register_hook(refuse)
        return result

    return run


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (scaled, "differs by "),
        (raising, "does not run here: no kernel for this device"),
        (raising_in_backward, "does not run here: wrong results on this device"),
    ],
)
def test_a_library_that_is_wrong_here_is_not_used(wrong: Any, problem: str, use: Any) -> None:
    module = module_of("Qwen3.5")
    use(not_there)
    with pytest.warns(UserWarning, match=SAID):
        ours = values(module)
    use(lambda function: wrong(library(module, function, [])))
    with pytest.warns(UserWarning, match=SAID) as caught:
        theirs = values(module)
    convolutions, rest = (str(one.message) for one in caught)
    assert convolutions.startswith(f"convolutions {SAID}, since triton {problem}")
    assert rest.startswith(f"scans {SAID}, since flash-linear-attention {problem}")
    torch.testing.assert_close(theirs, ours, rtol=0, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # It is said once.
        values(module)


def test_a_library_is_compared_outside_of_a_recomputation(use: Any) -> None:
    module = module_of("Qwen3.5")
    use(not_there)
    with pytest.warns(UserWarning, match=SAID):
        ours = values(module)
    module.causal.gradient_checkpointing_enable({"use_reentrant": False})
    sizes: list[int] = []
    use(lambda function: library(module, function, sizes))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs = values(module)
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=5e-5)
    assert sum(sizes[-2:]) == len(tree_batch().tokens)


@pytest.mark.parametrize(
    ("capability", "given", "used"),
    [((9, 0), {}, True), ((8, 6), {}, False), ((9, 0), {"FLA_CACHE_MODE": "full"}, False)],
)
def test_kernels_run_as_was_the_fastest_on_such_a_device(
    capability: tuple[int, int], given: Any, *, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tuner:
        def __init__(self, kernel_name: str) -> None:
            self.kernel_name = kernel_name
            self.fn = SimpleNamespace(run=lambda *args, **kwargs: (args, kwargs))

        def run(self, *_: Any, **__: Any) -> str:
            return "timed"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(os, "environ", dict(given))
    code = SimpleNamespace(CachedAutotuner=Tuner)
    monkeypatch.setattr(scans, "import_module", {"fla.ops.utils.cache": code}.__getitem__)
    scans.use_tuned_configs()
    # All layers ask in every forward, but the file is read once.
    monkeypatch.setattr(scans, "TUNED", Path("missing"))
    scans.use_tuned_configs()
    options = {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 3}
    expected: Any = ((1,), {"grid": 2, **options}) if used else "timed"
    assert Tuner("chunk_fwd_kernel_o").run(1, grid=2) == expected
    assert Tuner("another").run(1, grid=2) == "timed"


def test_another_version_of_the_library_chooses_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(scans, "import_module", lambda _: SimpleNamespace())
    scans.use_tuned_configs()


def test_a_missing_library_is_named_with_what_installs_it(use: Any) -> None:
    use(not_there)
    with pytest.warns(UserWarning, match=SAID) as caught:
        values(module_of("Bamba"))
    assert [str(one.message) for one in caught] == [
        f"convolutions {SAID}, since triton is not installed; run `pip install triton`",
        f"scans {SAID}, since flash-linear-attention is not installed; run "
        "`pip install 'rlhf-kernels[fla]'`",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_rehearsal_keeps_what_a_library_keeps(
    name: str, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(name).to("meta", torch.bfloat16)
    batch = tree_batch().to(torch.device("meta"))
    kept = []
    use(not_there)
    for by_library in (True, False):
        monkeypatch.setattr(recurrent, "fused_on", lambda kind, own=by_library: own)
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found = module(batch, token_logprobs)["logprobs"]
        found.sum().backward()
        kept.append(sum(sizes))
    assert kept[0] < 0.8 * kept[1]


@pytest.mark.parametrize("starts", [False, True], ids=["from zeros", "from states"])
@pytest.mark.parametrize("follows", [False, True], ids=["last", "state read"])
def test_mamba_by_linear_attention_gives_what_torch_gives(starts: bool, follows: bool) -> None:
    own = own_of(module_of("Bamba"), "PARTS")
    torch.manual_seed(0)
    shapes = (
        (1, 9, 4, 8),
        (1, 9, 4),
        (4,),
        (1, 9, 2, 16),
        (1, 9, 2, 16),
        (4,),
        (4,),
        (1, 4, 8, 16),
    )
    inputs = [torch.randn(shape) for shape in shapes]
    inputs[2] = -inputs[2].abs()
    found = []
    for run in (own, partial(by_linear_attention, parts_of_torch([]))):
        *given, skipped, bias, state = leaves = [one.clone().requires_grad_() for one in inputs]
        output, final = run(
            *given, 64, D=skipped, dt_bias=bias, initial_states=state if starts else None,
            dt_softplus=True, dt_limit=(0.1, 0.9), return_final_states=True,
        )  # fmt: skip
        weights = torch.arange(output.numel()).view_as(output) / 100
        total = (output * weights).sum() + (final.square().sum() if follows else 0.0)
        total.backward()
        found.append([output, final, *(one.grad for one in leaves)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_rehearsal_of_mamba_keeps_what_its_scan_keeps() -> None:
    """Not the queries and keys of all heads, which backward computes again."""
    kept = []
    ends = {name: torch.tensor(each) for name, each in ends_of([4, 5]).items()}
    for device, parts in (("cpu", parts_of_torch([])), ("meta", META_PARTS)):
        shapes = ((1, 9, 4, 8), (1, 9, 4), (4,), (1, 9, 1, 16), (1, 9, 1, 16), (2, 4, 8, 16), (4,))
        *given, states, skipped = (
            torch.ones(shape, device=device, requires_grad=True) for shape in shapes
        )
        sizes: list[torch.Size] = []

        def pack(tensor: Tensor, sizes: list[torch.Size] = sizes) -> Tensor:
            sizes.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output, final = by_linear_attention(
                parts, *given, 64, D=skipped, initial_states=states, dt_softplus=True,
                return_final_states=True, **ends,
            )  # fmt: skip
        assert (output.shape, final.shape) == (given[0].shape, states.shape)
        (output.sum() + final.sum()).backward()
        assert all(one.grad.shape == one.shape for one in (*given, states, skipped))
        kept.append(sizes)
    assert kept[0] == kept[1]
    assert torch.Size((1, 9, 4, 16)) not in kept[0]
