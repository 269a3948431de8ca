"""Tree attention on a CUDA device: our kernel against one path at a time, and its gradients."""

import threading
from typing import Any

import pytest
import torch
import transformers
from engines import BareEngine
from families import FAMILIES, TREES, gradients, llama, row, tree_batch

from rlhf.data.batch import PackedBatch
from rlhf.engine import Mesh
from rlhf.model import attention
from rlhf.model.kernels.ahead import compile_ahead
from rlhf.model.kernels.layers import compile_layers
from rlhf.model.kernels.long_examples import KERNELS
from rlhf.model.kernels.tree import REHEARSED
from rlhf.model.masks import LONG
from rlhf.model.packed import PackedModel
from rlhf.model.parts import decoder, layers_of
from rlhf.model.probe import choose_path
from rlhf.readouts import token_logprobs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda")


def module_of(name: str, dtype: torch.dtype) -> PackedModel:
    config_class, options = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**options)
    causal = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in causal.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return PackedModel(causal.eval().to("cuda", dtype))


class CudaEngine(BareEngine):
    device = torch.device("cuda")

    def __init__(self, module: PackedModel, precision: str) -> None:
        super().__init__(module)
        self.precision = precision


def run(module: PackedModel, path: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    module.path = path
    found = module(tree_batch().to(torch.device("cuda")), token_logprobs)["logprobs"]
    (found * torch.linspace(-1, 2, len(found), device="cuda")).sum().backward()
    return found.detach(), gradients(module.causal)


@pytest.mark.parametrize("name", TREES)
def test_the_probe_chooses_the_tree_and_its_gradients_are_right(name: str) -> None:
    module = module_of(name, torch.float32)
    choice = choose_path(CudaEngine(module, "fp32"), Mesh(device=torch.device("cuda")))
    assert choice.path == "tree", str(choice)
    logprobs, expected = run(module, "separate")
    found, actual = run(module, "tree")
    torch.testing.assert_close(found, logprobs, rtol=1e-3, atol=1e-3)
    for parameter, gradient in expected.items():
        scale = float(gradient.abs().max()) + 1e-3
        torch.testing.assert_close(
            actual[parameter] / scale, gradient / scale, rtol=0, atol=2e-3, msg=parameter
        )


@pytest.mark.parametrize("name", TREES)
def test_the_probe_chooses_the_tree_in_bf16(name: str) -> None:
    module = module_of(name, torch.bfloat16)
    choice = choose_path(CudaEngine(module, "bf16"), Mesh(device=torch.device("cuda")))
    assert choice.path == "tree", str(choice)


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
    REHEARSED.clear()
    module.packed_row(row(60, 40).to(torch.device("meta")))
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    compile_ahead(REHEARSED, CUDA)
    module = llama(head_dim=40).to("cuda", torch.bfloat16)
    module.packed_row(row(100, 500).to(CUDA)).sum().backward()
    assert len(threads) == 3
    assert threading.main_thread() not in threads


def test_long_examples_run_by_cudnn_as_by_our_kernel_in_plain_and_compiled_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With larger weights rounding to bf16 alone changes gradients by as much as a wrong mask.
    module = llama(hidden_size=256, head_dim=64, initializer_range=0.04)
    module = module.to("cuda", torch.bfloat16).train()
    batches = [row(LONG + 300, LONG).to(CUDA), row(2 * LONG - 70).to(CUDA)]
    calls: list[int] = []
    own = KERNELS["cuda"]
    counted = own._replace(forward=lambda *given: calls.append(1) or own.forward(*given))
    monkeypatch.setitem(KERNELS, "cuda", counted)

    with monkeypatch.context() as by_kernel:
        by_kernel.setattr(attention, "cudnn_agrees", lambda kind: False)
        expected = states_and_gradients(module, batches)
    for how in ("plain", "compiled"):
        if how == "compiled":
            compile_layers(decoder(module.causal), None, longest=LONG)
        calls.clear()
        found = states_and_gradients(module, batches)
        assert len(calls) >= 3 * len(layers_of(decoder(module.causal))), how
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine - theirs).norm() / theirs.norm() < 4e-2, how


def states_and_gradients(module: PackedModel, batches: list[PackedBatch]) -> list[torch.Tensor]:
    states = [module.packed_row(batch) for batch in batches]
    generator = torch.Generator("cuda").manual_seed(0)
    for state in states:
        weights = torch.randn(state.shape, generator=generator, device="cuda")
        (state.float() * weights).sum().backward()
    found = [state.detach().float() for state in states]
    return found + [value.float() for value in gradients(module.causal).values()]
