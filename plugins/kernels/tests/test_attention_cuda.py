"""Attention on a CUDA device: which kernels are compiled, and libraries against our kernel."""

import threading
from functools import partial
from typing import Any

import pytest
import torch

from rlhf.data.batch import PackedBatch
from rlhf.data.example import Answer, Example
from rlhf.data.packing import pack
from rlhf.kernels import BLOCK, Spans, Tree
from rlhf.model import attention
from rlhf.model.accelerated import kernels_on, rehearsed_attention
from rlhf.model.packed import PackedModel
from rlhf.model.parts import decoder, layers_of
from rlhf_devkit.families import gradients, llama, row
from rlhf_kernels import flash, libraries, rows
from rlhf_kernels.cudnn import KERNELS
from rlhf_kernels.flash import flash_row
from rlhf_kernels.kernels import TritonKernels
from rlhf_kernels.layers import compile_layers
from rlhf_kernels.libraries import values_and_gradients
from rlhf_kernels.rows import LONG, LONG_SHARED, Form, Row, has_flash, layout
from rlhf_kernels.tree import Heads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda")


def test_rows_of_all_lengths_need_one_compiled_kernel_of_each_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    knobs = pytest.importorskip("triton").knobs
    compiled: list[str] = []

    def hook(*, fn: Any, **_: Any) -> None:
        compiled.append(f"{fn.module}.{fn.name}")

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    torch._dynamo.utils.counters.clear()
    # Heads of a width that no other test has.
    module = llama(head_dim=72).to("cuda")
    for lengths in ((60, 40), (128,), (1000, 24), (5,) * 26):
        module.packed_row(row(*lengths).to(CUDA)).sum().backward()
    # Also where the gradients of keys are summed from those of each head.
    monkeypatch.setattr("rlhf_kernels.attention.is_uneven", lambda *_: True)
    module.packed_row(row(60, 40).to(CUDA)).sum().backward()
    kernels = [name for name in compiled if "attention" in name]
    assert len(kernels) == 3, kernels
    assert not torch._dynamo.utils.counters["stats"]


def test_a_rehearsal_shows_which_kernels_a_run_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs
    threads: list[Any] = []

    def hook(*, fn: Any, **_: Any) -> None:
        if "attention" in fn.module:
            threads.append(threading.current_thread())

    # Heads of a width that no other test has.
    module = llama(head_dim=40).to("meta", torch.bfloat16)
    with rehearsed_attention() as kinds:
        module.packed_row(row(60, 40).to(torch.device("meta")))
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    kernels = kernels_on(CUDA)
    assert kernels is not None
    kernels.compile_ahead(kinds, CUDA)
    module = llama(head_dim=40).to("cuda", torch.bfloat16)
    module.packed_row(row(100, 500).to(CUDA)).sum().backward()
    assert len(threads) == 3
    assert threading.main_thread() not in threads


LIBRARY = pytest.mark.parametrize(
    "name",
    [
        "cudnn",
        pytest.param("flash", marks=pytest.mark.skipif(not has_flash(), reason="needs flash-attn")),
    ],
)


@LIBRARY
def test_long_examples_run_by_a_library_as_by_our_kernel_in_plain_and_compiled_layers(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # With larger weights rounding to bf16 alone changes gradients by as much as a wrong mask.
    module = llama(hidden_size=256, head_dim=64, initializer_range=0.04)
    module = module.to("cuda", torch.bfloat16).train()
    long = LONG["cudnn"]
    batches = [row(long + 300, long).to(CUDA), row(2 * long - 70).to(CUDA)]
    if name == "flash":
        batches.append(row(*range(1900, 2400, 50)).to(CUDA))
        batches.append(tree((LONG_SHARED, (300, 200)), (LONG_SHARED, (100, 500, 400))).to(CUDA))
    calls: list[int] = []

    def counted(kernel: Any) -> Any:
        return lambda *given: calls.append(1) or kernel(*given)

    cudnn = KERNELS["cuda"]
    monkeypatch.setitem(KERNELS, "cuda", cudnn._replace(forward=counted(cudnn.forward)))
    monkeypatch.setattr(flash, "attend", counted(flash.attend))
    monkeypatch.setattr(rows, "LONG", {name: LONG[name]})
    kernels = TritonKernels()
    monkeypatch.setattr(attention, "kernels_on", lambda device: kernels)
    chooser = kernels.attention.libraries

    with monkeypatch.context() as by_kernel:
        by_kernel.setattr(chooser, "choose", lambda packed: {})
        expected = states_and_gradients(module, batches)
    num_calls = 0
    for packed in (Row(Tree(batch)) for batch in batches):
        assert set(chooser.choose(packed).values()) == {name}
        passes = 1 + (packed.form == "shared")
        num_calls += passes if name == "flash" else len(packed.sizes)
    num_calls *= len(layers_of(decoder(module.causal)))
    for how in ("plain", "compiled"):
        if how == "compiled":
            compile_layers(decoder(module.causal), None)
        calls.clear()
        found = states_and_gradients(module, batches)
        assert len(calls) == num_calls, how
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine - theirs).norm() / theirs.norm() < 4e-2, how


def tree(*spans: tuple[int, tuple[int, ...]]) -> PackedBatch:
    examples = [
        Example([1] * prompt, [Answer([1 + k % 90 for k in range(n)]) for n in answers])
        for prompt, answers in spans
    ]
    return pack(examples, range(len(examples)), round_to=BLOCK)


KIND = Heads(8, 2, 64, 64, torch.bfloat16, 0.125, None)


@pytest.mark.skipif(not has_flash(), reason="needs flash-attn-4")
@pytest.mark.parametrize("form", ["one", "several", "shared"])
def test_flash_attention_has_the_same_gradients_in_each_deterministic_run(form: Form) -> None:
    assert libraries.disagreement("flash", KIND, libraries.PROBED[form], CUDA) is None
    spans: Spans = ((0, (2500,)),) * (1 if form == "one" else 2)
    if form == "shared":
        spans = ((3000, (900, 800)),) * 2
    num_tokens = sum(prompt + sum(answers) for prompt, answers in spans)
    parts = layout(spans, num_tokens, CUDA)
    given = [
        torch.randn(1, num_tokens, heads, 64, device=CUDA, dtype=torch.bfloat16).transpose(1, 2)
        for heads in (8, 2, 2, 8)
    ]
    attend = partial(flash_row, parts=parts, scale=0.125)
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (values_and_gradients(attend, *given) for _ in range(4))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def states_and_gradients(module: PackedModel, batches: list[PackedBatch]) -> list[torch.Tensor]:
    states = [module.packed_row(batch)[batch.example >= 0] for batch in batches]
    generator = torch.Generator("cuda").manual_seed(0)
    for state in states:
        weights = torch.randn(state.shape, generator=generator, device="cuda")
        (state.float() * weights).sum().backward()
    found = [state.detach().float() for state in states]
    return found + [value.float() for value in gradients(module.causal).values()]
