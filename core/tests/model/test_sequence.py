"""Rows divided over ranks: hidden states, gradients and readouts are those of one rank."""

import copy
from typing import Any

import pytest
import torch
from attrs import evolve
from families import family
from torch import distributed
from transformers import LlamaConfig, Mamba2Config

from rlhf.config.sections import ModelConfig
from rlhf.data.packing import filler
from rlhf.engine import Axis, Mesh, axes
from rlhf.errors import RLHFError
from rlhf.model.accelerated import check_packed
from rlhf.model.packed import PackedModel
from rlhf.model.sequence import all_rows, check_heads, part_of_rank
from rlhf.readouts import summed_logprobs, token_logprobs
from rlhf_devkit.families import SIZES, tree_batch
from rlhf_devkit.ranks import Ranks, ranks_fixture, shared

pair = ranks_fixture(2)

WITH_WINDOWS_CAPS_AND_SINKS = ("Llama", "Gemma 2", "GPT-OSS")
OTHERS = ("Qwen2", "Qwen3", "Mistral", "Gemma 3", "Phi-3")


def sequence_axis() -> Axis:
    return Axis(rank=distributed.get_rank(), size=distributed.get_world_size())


def one_loss(module: PackedModel, *, summed: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """A loss of different weights of the predictions, and what was read."""
    batch = tree_batch()
    if summed:
        read: dict[str, Any] = module(batch, summed_logprobs)
        return read.pop("sum"), read
    read = module(batch, token_logprobs)
    return (read["logprobs"] * torch.arange(len(batch.predict))).sum(), read


def gradients(module: PackedModel) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]


def errors(name: str) -> float:
    """The largest relative error on this rank of losses, readouts and the gradients' sums."""
    known = family(name).module
    assert known.path == "tree"
    divided = copy.deepcopy(known)
    divided.sequence = axis = sequence_axis()
    worst = []
    for summed in (False, True):
        found = []
        for module, share in ((known, 1), (divided, axis.size)):
            module.zero_grad(set_to_none=True)
            loss, read = one_loss(module, summed=summed)
            (loss / share).backward()
            if share > 1:
                for gradient in gradients(module):
                    axis.sum(gradient)
            found.append([loss.detach(), *read.values(), *gradients(module)])
        worst += [
            float((b - a).norm() / a.norm().clamp_min(1e-3)) for a, b in zip(*found, strict=True)
        ]
    return max(worst)


@pytest.mark.parametrize(
    "name",
    [*WITH_WINDOWS_CAPS_AND_SINKS, *(pytest.param(n, marks=pytest.mark.matrix) for n in OTHERS)],
)
@pytest.mark.parametrize("world", [2, 4])
def test_trees_that_lie_on_several_ranks_are_computed_as_on_one(name: str, world: int) -> None:
    # On 4 ranks each of the two KV heads is repeated once.
    assert max(shared(world).run(errors, name)) < 2e-5


def router_errors() -> float:
    """The largest error on this rank of the router loss of experts and of its gradients' sums."""
    found = []
    for axis in (Axis(), sequence_axis()):
        module = copy.deepcopy(family("Mixtral").module).train()
        module.sequence, module.router_loss = axis, 1.0
        module(tree_batch(), token_logprobs)
        (loss,) = module.router_losses
        (loss / axis.size).backward()
        found.append([loss.detach(), *(axis.sum(gradient) for gradient in gradients(module))])
    assert found[0][0] > 1
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def test_the_router_loss_is_that_of_one_rank(pair: Ranks) -> None:
    assert max(pair.run(router_errors)) < 1e-4


def rows_of_a_filler() -> bool:
    module = copy.deepcopy(family("Llama").module)
    module.sequence = sequence_axis()
    read = module(filler(), token_logprobs)["logprobs"]
    return read.shape == (0,) and read.requires_grad


def test_a_rank_without_rows_takes_part(pair: Ranks) -> None:
    assert pair.run(rows_of_a_filler) == [True, True]


def uneven_rows() -> tuple[list[int], list[float]]:
    """All of 5 rows on ranks that have 3 and 2, and the gradient of this rank's."""
    axis = sequence_axis()
    own = torch.arange(5.0)[part_of_rank(5, axis)].requires_grad_()
    whole = all_rows(own, 5, axis)
    (whole * torch.arange(5.0) * (axis.rank + 1)).sum().backward()
    assert own.grad is not None
    return whole.int().tolist(), own.grad.tolist()


def test_uneven_parts_make_the_whole_and_each_gets_the_sum_of_the_gradients(pair: Ranks) -> None:
    assert pair.run(uneven_rows) == [([0, 1, 2, 3, 4], [0, 3, 6]), ([0, 1, 2, 3, 4], [9, 12])]


def test_more_ranks_than_rows_leave_some_without() -> None:
    parts = [part_of_rank(3, Axis(rank=rank, size=4)) for rank in range(4)]
    assert [len(range(part.start, part.stop)) for part in parts] == [1, 1, 1, 0]


def test_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    places: dict[str, Any] = axes(0, data=2, sequence=6)
    architecture = LlamaConfig(**SIZES | {"num_attention_heads": 4, "num_key_value_heads": 4})
    with pytest.raises(RLHFError) as error:
        check_heads(architecture, Mesh(world=12, **places))
    assert str(error.value) == (
        "the model has 4 attention heads, which 6 sequence ranks do not divide; set "
        "sequence_parallel to 1 or 2 or 4"
    )


def test_a_model_without_attention_has_no_heads_to_divide() -> None:
    check_heads(Mamba2Config(), Mesh())


def test_a_model_without_packed_rows_is_refused() -> None:
    check_packed("packed", "", ModelConfig(), Axis(size=2))
    check_packed("padded", "", ModelConfig(), Axis())
    with pytest.raises(RLHFError) as error:
        check_packed("padded", "its attention cannot be replaced", ModelConfig(), Axis(size=2))
    assert str(error.value) == (
        "sequence ranks divide packed rows, but this model runs on the path 'padded' (its "
        "attention cannot be replaced); set sequence_parallel to 1"
    )


def test_inputs_of_a_whole_row_are_refused() -> None:
    module = copy.deepcopy(family("Llama").module)
    module.sequence = Axis(size=2)
    batch = evolve(tree_batch(), inputs={"pixel_values": torch.zeros(1)})
    with pytest.raises(RLHFError) as error:
        module(batch, token_logprobs)
    assert str(error.value) == (
        "the model's extra inputs (pixel_values) belong to a whole row, which sequence ranks "
        "divide; set sequence_parallel to 1"
    )
