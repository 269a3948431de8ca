"""Rows divided over two ranks of one CUDA device, which exchange through the host: its kernels get
a part of the heads."""

from typing import Any

import pytest
import torch
from families import on_cuda
from torch import Tensor, distributed

from rlhf.data.batch import PackedBatch
from rlhf.engine import Axis
from rlhf.model import sequence
from rlhf.model.packed import PackedModel
from rlhf.readouts import token_logprobs
from rlhf_devkit.families import row, tree_batch
from rlhf_devkit.ranks import shared

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda")


def through_the_host(values: Tensor, axis: Axis) -> Tensor:
    sent = values.cpu().contiguous()
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent)
    return received.to(CUDA)


def logprobs_and_gradients(module: PackedModel, batch: PackedBatch) -> list[Tensor]:
    read = module(batch.to(CUDA), token_logprobs)["logprobs"]
    (read * torch.linspace(-1, 2, len(read), device=CUDA)).sum().div(
        module.sequence.size
    ).backward()
    return [read.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def error(name: str, dtype: torch.dtype, lengths: tuple[int, ...]) -> float:
    """The error of a divided row on this rank, as a share of the largest number of each tensor."""
    batch: Any = row(*lengths) if lengths else tree_batch()
    expected = logprobs_and_gradients(on_cuda(name, dtype), batch)
    module, own = on_cuda(name, dtype), sequence._exchanged
    module.sequence = Axis(rank=distributed.get_rank(), size=2)
    sequence._exchanged = through_the_host
    try:
        logprobs, *gradients = logprobs_and_gradients(module, batch)
    finally:
        sequence._exchanged = own
    for gradient in gradients:
        whole = gradient.float().cpu()
        distributed.all_reduce(whole)
        gradient.copy_(whole)
    pairs = zip(expected, (logprobs, *gradients), strict=True)
    return max(float((a - b).abs().max() / (a.abs().max() + 1e-3)) for a, b in pairs)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma 2", "Gemma 3", "GPT-OSS"])
def test_trees_on_two_ranks_are_computed_as_on_one(name: str) -> None:
    assert max(shared(2).run(error, name, torch.float32, ())) < 2e-3


def test_long_examples_on_two_ranks_are_computed_as_on_one() -> None:
    # Without trees, caps and sinks these are computed by a library.
    assert max(shared(2).run(error, "Llama", torch.bfloat16, (7000, 6500))) < 3e-2
