"""Compiled layers: the same numbers, few graphs, and what is refused."""

import shutil
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from rlhf.config.sections import ModelConfig
from rlhf.errors import RLHFError
from rlhf.forwards import replace_forward
from rlhf.memory.estimate import LiveBytes
from rlhf.model import attention
from rlhf.model.packed import PackedModel
from rlhf.model.parts import decoder, layers_of
from rlhf.reference.live import adapter_off
from rlhf.request.reader import read_config
from rlhf_devkit.families import FAMILIES, llama, row
from rlhf_kernels import fp8, layers
from rlhf_kernels.compiler import mark_any_size
from rlhf_kernels.fp8 import fits_fp8, to_fp8
from rlhf_kernels.layers import check_compilable, compile_layers, rehearse_layers
from rlhf_kernels.lora import forward, is_plain

LAYERS = 3


def dense(query: Any, key: Any, value: Any, mask: Any, scoring: Any) -> Tensor:
    """In the place of the kernel; like it, it knows a tree by only its tensors."""
    place = torch.arange(query.shape[2])
    seen = mask.visible(place[:, None], place[None, :])
    row = (query, attention.repeat_heads(key, query), attention.repeat_heads(value, query))
    return torch.nn.functional.scaled_dot_product_attention(*row, attn_mask=seen)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """How many graphs were compiled so far, with attention that can be compiled here."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(layers, "_inductor", "aot_eager")
    layers._compiler.cache_clear()
    monkeypatch.setattr(attention, "split_tree", dense)
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    layers._compiler.cache_clear()
    torch._dynamo.reset()


def gradients(module: PackedModel, *batches: Any) -> list[Tensor]:
    module.zero_grad()
    for batch in batches:
        hidden = module.packed_row(batch)
        (hidden * torch.linspace(-1, 1, hidden.shape[-1])).sum().backward()
    # The head has none.
    return [item.grad.clone() for item in module.parameters() if item.grad is not None]


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_layers_equal_the_models_layers(graphs: Any, recompute: bool) -> None:
    module = llama().train()
    batches = [row(90, 40, 30), row(200, 100), row(300), row(100, 150, 140)]
    expected = gradients(module, *batches)
    if recompute:
        module.causal.gradient_checkpointing_enable({"use_reentrant": False})
    said = compile_layers(decoder(module.causal), None)
    assert said == "layers     compiled by torch.compile"
    for found, wanted in zip(gradients(module, *batches), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert graphs() == 1, "for all rows and all layers"


def test_a_second_model_of_another_width_is_compiled_for_its_own_sizes(
    monkeypatch: pytest.MonkeyPatch, graphs: Any
) -> None:
    widths: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        widths.append(next(item.shape[3] for item in inputs if getattr(item, "ndim", 0) == 4))
        return aot_eager(graph, inputs)

    monkeypatch.setattr(layers, "_inductor", backend)
    for width, head_dim in ((32, 8), (48, 16)):
        module = llama(hidden_size=width, head_dim=head_dim)
        compile_layers(decoder(module.causal), None)
        gradients(module, row(200, 100), row(300))
    assert widths == [32, 48], "one graph each"


def test_only_marked_sizes_are_left_open() -> None:
    widths: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        values = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        # A size that is left open has the name of a symbol.
        widths.append(next(str(each.shape[1]) for each in values if isinstance(each, Tensor)))
        return graph

    torch._dynamo.reset()
    double = torch.compile(lambda tensor: 2 * tensor, backend=backend)
    for shape in ((4, 3), (7, 3), (4, 5), (9, 5)):
        tensor = torch.zeros(shape)
        mark_any_size(tensor, 0)
        double(tensor)
    torch._dynamo.reset()
    assert widths == ["3", "5"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles C++ on a CPU")
def test_compiled_code_rounds_where_the_models_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up + gate

    # They would be kept beside the session's temporary files.
    monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)
    torch._dynamo.reset()
    compiled = torch.compile(own, backend=layers._inductor)
    gate, up = torch.randn(2, 64, 64).bfloat16()
    for needs_gradient in (False, True):
        gate.requires_grad_(needs_gradient)
        assert torch.equal(compiled(gate, up), own(gate, up))
    torch._dynamo.reset()


def test_a_family_that_passes_its_mask_by_position_is_compiled_too(graphs: Any) -> None:
    torch.manual_seed(0)
    config, sizes = FAMILIES["GPT-2"]
    causal = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes))
    module = PackedModel(causal.eval())
    expected = module.packed_row(row(20, 30))
    compile_layers(decoder(causal), None)
    torch.testing.assert_close(module.packed_row(row(20, 30)), expected, rtol=1e-4, atol=1e-5)
    assert graphs() == 1


@pytest.mark.matrix
def test_layers_with_graph_breaks_are_compiled_for_rows_of_all_lengths(graphs: Any) -> None:
    config, sizes = FAMILIES["Mixtral"]
    causal = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes))
    causal.set_experts_implementation("eager")
    module = PackedModel(causal)
    compile_layers(decoder(causal), None)
    numbers = []
    for batch in (row(200, 100), row(300), row(90, 40, 30), row(500), row(700), row(850)):
        gradients(module, batch)
        numbers.append(graphs())
    assert numbers[0] > 1
    assert numbers[-1] == numbers[-3]


def test_other_rows_run_the_models_layers(graphs: Any) -> None:
    module = llama()
    compile_layers(decoder(module.causal), None)
    module.path = "separate"
    module.hidden(row(20, 30))
    assert not graphs()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_products_in_fp8_are_near_and_keep_names(recipe: str) -> None:
    pytest.importorskip("torchao")
    module = llama().to(torch.bfloat16)
    names = [name for name, _ in module.named_parameters()]
    batch = row(90, 40, 30)
    expected = module.packed_row(batch)
    assert to_fp8(layers_of(decoder(module.causal)), recipe, emulate=True) == 7 * LAYERS
    assert [name for name, _ in module.named_parameters()] == names
    assert 1e-4 < error(module.packed_row(batch), expected) < 0.3


def adapted(module: PackedModel) -> PackedModel:
    settings = LoraConfig(
        r=16, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return PackedModel(get_peft_model(module.causal, settings, autocast_adapter_dtype=False))


def test_compiled_layers_with_adapters_equal_the_models_layers(graphs: Any) -> None:
    module = adapted(llama()).train()
    batches = [row(90, 40, 30), row(200, 100), row(300)]
    expected = gradients(module, *batches)
    for layer in filter(is_plain, module.modules()):
        replace_forward(layer, forward.__get__(layer))
    compile_layers(decoder(module.causal), None)
    for found, wanted in zip(gradients(module, *batches), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert graphs() == 2, "nothing before the first layer has a gradient"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_under_adapters_the_frozen_products_are_in_fp8_and_the_factors_are_not(recipe: str) -> None:
    pytest.importorskip("torchao")
    assert read_config("sft", overrides=["--model.fp8", recipe, "--lora", "16"], inputs=False)
    module = adapted(llama().to(torch.bfloat16))
    trained = {name: item.requires_grad for name, item in module.named_parameters()}
    batch = row(90, 38)
    with torch.no_grad(), adapter_off(module.model):
        base = module.packed_row(batch)
    expected = module.packed_row(batch)
    assert to_fp8(layers_of(decoder(module.causal)), recipe, emulate=True) == 7 * LAYERS
    assert {name: item.requires_grad for name, item in module.named_parameters()} == trained
    assert all(type(item) is torch.nn.Linear for item in factors(module))
    found = module.packed_row(batch)
    found.sum().backward()
    assert 1e-4 < error(found, expected) < 0.3
    for name, item in module.named_parameters():
        assert (item.grad is not None) == ("lora_" in name) == trained[name], name
    with torch.no_grad(), adapter_off(module.model):
        assert 1e-4 < error(module.packed_row(batch), base) < 0.3


def factors(module: PackedModel) -> list[torch.nn.Module]:
    return [item for name, item in module.named_modules() if ".lora_" in name and item._parameters]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().float().norm() / expected.detach().float().norm())


def test_a_product_of_unsupported_sizes_stays_in_bf16() -> None:
    assert fits_fp8(torch.nn.Linear(32, 48))
    assert not fits_fp8(torch.nn.Linear(32, 40))
    assert not fits_fp8(torch.nn.LayerNorm(32))


def test_a_rehearsal_keeps_one_byte_of_each_normed_input_of_products_in_fp8() -> None:
    def kept(*, fp8: bool, lora: bool = False) -> int:
        with torch.device("meta"):
            module = llama(hidden_size=64, intermediate_size=128)
            module = adapted(module) if lora else module
        settings = ModelConfig(kernels="compile", fp8="tensorwise" if fp8 else None)
        rehearse_layers(decoder(module.causal), settings)
        batch = row(90, 40, 30).to(torch.device("meta"))
        with LiveBytes(known=list(module.parameters())) as counter:
            hidden = module.packed_row(batch)
            kept = counter.live
        hidden.sum().backward()
        return kept

    # Of two normed inputs one byte is left of four, of what attention gives none; the gated product
    # is not kept in any case.
    assert kept(fp8=False) - kept(fp8=True) == 256 * LAYERS * (2 * 3 * 64 + 4 * 64)
    # A frozen weight needs no input; adapters keep theirs.
    assert kept(fp8=False, lora=True) == kept(fp8=True, lora=True)


def test_unsupported_devices_are_reported() -> None:
    words = ["--model.kernels", "compile"]
    config = read_config("sft", overrides=words, inputs=False).config
    with pytest.raises(RLHFError) as caught:
        check_compilable(config.model, torch.device("cpu"))
    assert str(caught.value) == (
        "model.kernels compile needs a CUDA device with Triton, but this run is on cpu; remove "
        "model.kernels compile"
    )


@pytest.mark.parametrize(
    ("chip", "torchao", "problem"),
    [
        (
            (8, 0),
            "0.18.0",
            "needs compute capability 9.0, but this device has 8.0; remove model.fp8",
        ),
        ((9, 0), None, "needs torchao; pip install 'rlhf-kernels[fp8]'"),
        (
            (9, 0),
            "0.17.1",
            "needs torchao 0.18, but 0.17.1 is installed; pip install 'rlhf-kernels[fp8]'",
        ),
        ((9, 0), "0.18.0", ""),
    ],
)
def test_missing_requirements_of_fp8_are_reported(
    chip: tuple[int, int], torchao: str | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if torchao is None:
            raise PackageNotFoundError(name)
        return torchao

    monkeypatch.setattr(layers, "fused_on", lambda kind: True)
    monkeypatch.setattr(fp8, "version", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: chip)
    words = ["--model.fp8", "rowwise", "--model.dtype", "bf16"]
    config = read_config("sft", overrides=words, inputs=False).config
    if not problem:
        check_compilable(config.model, torch.device("cuda"))
        return
    with pytest.raises(RLHFError) as caught:
        check_compilable(config.model, torch.device("cuda"))
    assert str(caught.value) == f"model.fp8 rowwise {problem}"
