"""Weights that pass through pinned memory on their way to an accelerator."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from small_models import SIZES, config_of, write_model
from transformers import AutoModelForCausalLM, LlamaConfig, core_model_loading

from rlhf import devices
from rlhf.devices import through_pinned_memory
from rlhf.engine import Mesh, Plan
from rlhf.model import weights
from rlhf.model.load import load_model
from rlhf.model.role import ModelSpec
from rlhf.model.weights import pinned_copies

CPU = torch.device("cpu")
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("shape", [(), (0, 3), (7, 5), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_a_copy_in_pieces_is_whole(
    shape: tuple[int, ...], dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []

    def pin(piece: torch.Tensor) -> torch.Tensor:
        pieces.append(piece.numel())
        return piece

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(devices, "PIECE", 44)
    values = torch.randn(shape)
    copy = through_pinned_memory(values, CPU, dtype)
    expected = values.to(dtype or values.dtype)
    assert (copy.dtype, copy.shape) == (expected.dtype, expected.shape)
    assert torch.equal(copy, expected)
    assert max(pieces) <= 11
    assert sum(pieces) == values.numel()


def test_only_copies_to_an_accelerator_are_pinned_and_only_while_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[Any] = []

    def through(values: torch.Tensor, *where: Any) -> torch.Tensor:
        passed.append((values.tolist(), *where))
        return values

    monkeypatch.setattr(weights, "through_pinned_memory", through)
    save_file({"a": torch.tensor([1.0, 2.0])}, tmp_path / "rows.safetensors")
    # Fails if transformers loads weights in another way, so that they are copied slowly again.
    own = core_model_loading._materialize_copy
    assert list(inspect.signature(own).parameters) == ["tensor", "device", "dtype"]
    with safe_open(tmp_path / "rows.safetensors", "pt") as file, pinned_copies():
        copy = core_model_loading._materialize_copy
        for device in (None, "cpu", CPU, torch.device("meta")):
            assert copy(file.get_slice("a"), device, torch.float64).dtype == torch.float64
        assert not passed
        copy(file.get_slice("a"), "cuda:1", torch.bfloat16)
    assert passed == [([1.0, 2.0], torch.device("cuda:1"), torch.bfloat16)]
    assert core_model_loading._materialize_copy is own


def test_another_version_without_this_function_loads_as_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "core_model_loading", object())
    with pinned_copies():
        pass


@NEEDS_CUDA
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_on_a_device_are_those_of_the_folder(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "PIECE", 1000)
    path = write_model(tmp_path, LlamaConfig(**SIZES, tie_word_embeddings=True))
    mesh = Mesh(device=torch.device("cuda", 0))
    plan, hooks = Plan(stage=0, precision=precision), Any
    module = load_model(ModelSpec(config=config_of(path)), plan=plan, mesh=mesh, hooks=hooks)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    own = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).state_dict()
    found = module.causal.state_dict()
    assert found.keys() == own.keys()
    for name, value in found.items():
        assert value.device.type == "cuda"
        assert torch.equal(value.cpu(), own[name]), name
