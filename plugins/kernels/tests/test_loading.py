"""Weights that pass through pinned memory on their way to an accelerator."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, core_model_loading

from rlhf.config.sections import Config, ModelConfig
from rlhf.engine import Mesh, Plan
from rlhf.model.load import load_model
from rlhf.model.role import ModelSpec
from rlhf_kernels import kernels, loading
from rlhf_kernels.loading import pinned_copies, through_pinned_memory

CPU = torch.device("cpu")
SIZES: Any = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 48,
}  # fmt: skip
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def write_model(folder: Path, **settings: Any) -> str:
    """Write a model with random weights into `folder` and return its path."""
    torch.manual_seed(1)
    config = LlamaConfig(**SIZES, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def load(path: str, device: torch.device, precision: Any) -> Any:
    """Load the model of a run, as a single rank does."""
    spec = ModelSpec(config=Config(model=ModelConfig(path=path)))
    hooks: Any = None  # Of weights that no backend divides.
    plan = Plan(precision=precision)
    return load_model(spec, plan=plan, mesh=Mesh(device=device), hooks=hooks)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The pieces that are pinned, on a machine that need not have pinned memory."""
    pinned: list[torch.Tensor] = []

    def pin(piece: torch.Tensor) -> torch.Tensor:
        pinned.append(piece)
        return piece

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(loading, "PIECE", 44)
    return pinned


@pytest.mark.parametrize("shape", [(), (0, 3), (7, 5), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float64])
def test_a_copy_in_pieces_is_whole(
    shape: tuple[int, ...], dtype: torch.dtype | None, pieces: list[torch.Tensor]
) -> None:
    turned = torch.randn(shape).permute([*range(len(shape))][::-1])
    for values in (torch.randn(shape), turned.requires_grad_()):
        pieces.clear()
        with torch.enable_grad():
            copy = through_pinned_memory(values, CPU, dtype)
        expected = values.detach().to(dtype or values.dtype)
        assert (copy.dtype, copy.shape) == (expected.dtype, expected.shape)
        assert torch.equal(copy, expected)
        assert {piece.dtype for piece in pieces} == {copy.dtype}
        assert max(piece.nbytes for piece in pieces) <= 44
        assert sum(piece.numel() for piece in pieces) == values.numel()


def test_no_more_than_some_pieces_are_on_their_way(
    pieces: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(torch.cpu, "synchronize", lambda device: waited.append(len(pieces)))
    through_pinned_memory(torch.randn(11 * 10), CPU)
    assert waited == [4, 8, 10]


def test_only_copies_to_an_accelerator_are_pinned_and_only_while_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[Any] = []

    def through(values: torch.Tensor, *where: Any) -> torch.Tensor:
        passed.append((values.tolist(), *where))
        return values

    monkeypatch.setattr(loading, "through_pinned_memory", through)
    save_file({"a": torch.tensor([1.0, 2.0])}, tmp_path / "rows.safetensors")
    own = core_model_loading._materialize_copy
    with safe_open(tmp_path / "rows.safetensors", "pt") as file, pinned_copies():
        copy = core_model_loading._materialize_copy
        for device in (None, "cpu", CPU, torch.device("meta")):
            assert copy(file.get_slice("a"), device, torch.float64).dtype == torch.float64
        assert not passed
        copy(file.get_slice("a"), "cuda:1", torch.bfloat16)
    assert passed == [([1.0, 2.0], torch.device("cuda:1"), torch.bfloat16)]
    assert core_model_loading._materialize_copy is own


def test_each_weight_of_a_model_is_copied_by_the_function_that_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[Any] = []

    @contextmanager
    def counted() -> Iterator[None]:
        with pinned_copies():
            copy = core_model_loading._materialize_copy
            assert copy.__module__ == loading.__name__, "this version copies in another way"

            def count(tensor: Any, device: Any = None, dtype: Any = None) -> torch.Tensor:
                copied.append(tensor)
                return copy(tensor, device, dtype)

            monkeypatch.setattr(core_model_loading, "_materialize_copy", count)
            yield

    monkeypatch.setattr(kernels, "pinned_copies", counted)
    module = load(write_model(tmp_path), CPU, "fp32")
    assert len(copied) == len({*module.causal.parameters()})


@pytest.mark.parametrize("functions", [{}, {"_materialize_copy": lambda tensor, place: tensor}])
def test_another_version_of_transformers_copies_as_it_does(
    functions: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SimpleNamespace(**functions)
    monkeypatch.setattr(loading, "core_model_loading", other)
    with pinned_copies():
        assert vars(other) == functions


@NEEDS_CUDA
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_on_a_device_are_those_of_the_folder(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[torch.Tensor] = []

    def through(values: torch.Tensor, *where: Any) -> torch.Tensor:
        passed.append(values)
        return through_pinned_memory(values, *where)

    monkeypatch.setattr(loading, "through_pinned_memory", through)
    monkeypatch.setattr(loading, "PIECE", 1000)
    path = write_model(tmp_path, tie_word_embeddings=True)
    module = load(path, torch.device("cuda", 0), precision)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    own = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).state_dict()
    assert len(passed) == len({*module.causal.parameters()})
    found = module.causal.state_dict()
    assert found.keys() == own.keys()
    for name, value in found.items():
        assert value.device.type == "cuda"
        assert torch.equal(value.cpu(), own[name]), name
