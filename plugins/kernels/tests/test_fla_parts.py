"""The parts of flash-linear-attention, with stand-ins for its modules."""

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rlhf_kernels import scans
from rlhf_kernels.paths import CHUNK, ends_of
from rlhf_kernels.scans import LIBRARIES

KERNEL = "chunk_fwd_kernel_h"
NAMES = ["chunk_local_cumsum", "chunk_fwd_o", "chunk_bwd_dqkwg", "chunk_bwd_dv"]


class Config(NamedTuple):
    """A configuration of a kernel, as Triton has it."""

    kwargs: dict[str, int]
    num_warps: int
    num_stages: int


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`rlhf_kernels.fla_parts`, as it is with the library on a Hopper GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    states = SimpleNamespace()

    def offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
        return (cu_seqlens // chunk_size).cumsum(0)

    def number_of_chunks(*, cu_seqlens: Tensor, size: int) -> Any:
        return states.prepare_chunk_offsets(cu_seqlens, size)[-1].item()

    vars(states).update(
        prepare_chunk_offsets=offsets,
        chunk_fwd_h=number_of_chunks,
        chunk_bwd_dh=number_of_chunks,
    )
    tuner = SimpleNamespace(configs=[Config({"BK": size, "BV": 32}, 1, 4) for size in (32, 64)])
    setattr(states, KERNEL, SimpleNamespace(fn=tuner))
    others = SimpleNamespace(**dict.fromkeys(NAMES, len))
    found = {"common.chunk_h": states, "common.chunk_o": others, "utils": others}
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)
    name = "rlhf_kernels.fla_parts"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    del sys.modules[name]
    return module


def test_the_host_does_not_read_the_number_of_chunks_from_the_device(parts: Any) -> None:
    ends = {name: torch.tensor(each, device="meta") for name, each in ends_of([100, 150]).items()}
    for function in (parts.PARTS.states, parts.PARTS.for_states):
        assert function(**ends, size=CHUNK) == 5


def test_elsewhere_offsets_are_what_the_library_computes(parts: Any) -> None:
    ends = {name: torch.tensor(each) for name, each in ends_of([64, 64]).items()}
    assert parts.PARTS.states(**ends, size=32) == 6
    assert parts.PARTS.states(cu_seqlens=torch.tensor([0, 64]), chunk_indices=None, size=64) == 1
    offsets = parts._states.prepare_chunk_offsets(ends["cu_seqlens"], CHUNK)
    assert offsets[:-1].tolist() == [0, 1]
    assert type(offsets + 1) is Tensor


def test_a_kernel_that_triton_times_itself_has_one_configuration(parts: Any) -> None:
    tiles, launch = {"BK": 64, "BV": 64}, {"num_warps": 2, "num_stages": 2}
    assert scans.tuned_configs()[KERNEL] == {**tiles, **launch}
    assert getattr(parts._states, KERNEL).fn.configs == [Config(tiles, **launch)]


@pytest.mark.skipif(find_spec("fla") is not None, reason="it is installed")
def test_without_the_library_it_is_missing() -> None:
    with pytest.raises(ImportError):
        LIBRARIES["mamba2_chunk_scan"].load()
