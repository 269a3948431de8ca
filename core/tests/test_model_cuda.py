"""Tree attention on a CUDA device: flex attention against one path at a time, and its gradients."""

from typing import Any

import pytest
import torch
import transformers
from engines import BareEngine
from families import FAMILIES, TREES, gradients, llama, row, tree_batch

from rlhf.data.batch import PackedBatch
from rlhf.engine import Mesh
from rlhf.model import attention
from rlhf.model.kernels.layers import compile_layers
from rlhf.model.long_examples import KERNELS
from rlhf.model.masks import LONG
from rlhf.model.packed import PackedModel
from rlhf.model.parts import decoder, layers_of
from rlhf.model.probe import choose_path
from rlhf.readouts import token_logprobs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda")
HEADS = {"hidden_size": 64, "head_dim": 16, "n_embd": 64}
"""Flex attention wants heads of at least 16."""


def module_of(name: str, dtype: torch.dtype) -> PackedModel:
    config_class, options = FAMILIES[name]
    sizes = {key: value for key, value in HEADS.items() if key in options or key == "hidden_size"}
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**(options | sizes))
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


def test_a_new_batch_of_the_same_length_compiles_nothing_new() -> None:
    module = module_of("Llama", torch.float32)
    run(module, "tree")
    torch._dynamo.utils.counters.clear()
    run(module, "tree")
    assert not torch._dynamo.utils.counters["stats"].get("unique_graphs")


def test_long_examples_run_by_cudnn_as_by_flex_attention_in_plain_and_compiled_layers(
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

    with monkeypatch.context() as by_flex:
        by_flex.setattr(attention, "cudnn_agrees", lambda kind: False)
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
