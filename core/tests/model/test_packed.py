"""Rows unfolded from a packed batch, and passes that stay in step over ranks."""

from typing import Any

import torch
from engines import Shards
from torch import distributed
from transformers import AutoModelForCausalLM, LlamaConfig

from rlhf.data.example import Answer, Example
from rlhf.data.packing import blank_batch, pack
from rlhf.engine import register_sharding
from rlhf.model.masks import BLOCK
from rlhf.model.packed import PackedModel
from rlhf.model.unfold import (
    branches_of,
    padded_rows,
    rounded_up,
    unshared,
)
from rlhf_devkit.ranks import ranks_fixture

pair = ranks_fixture(2)

SPANS = ((3, (2, 4)), (0, (5,)), (2, (1,)))


def batch_of(spans: Any) -> Any:
    total = sum(prompt + sum(answers) for prompt, answers in spans) + 2
    return blank_batch(torch.arange(100, 100 + total), spans)


def test_every_answer_gets_its_own_copy_of_the_prompt() -> None:
    batch = batch_of(SPANS)
    tokens = [batch.tokens[path].tolist() for path in branches_of(batch)]
    assert tokens == [
        [100, 101, 102, 103, 104],
        [100, 101, 102, 105, 106, 107, 108],
        [109, 110, 111, 112, 113],
        [114, 115, 116],
    ]


def test_an_unshared_row_leads_back_to_every_token() -> None:
    batch = batch_of(SPANS)
    row, back = unshared(batch)
    assert len(row.tokens) == 20
    assert row.spans == ((5, ()), (7, ()), (5, ()), (3, ()))
    assert row.positions[:12].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]
    assert torch.equal(row.tokens[back][:-2], batch.tokens[:-2])
    assert torch.equal(row.positions[back][:-2], batch.positions[:-2])


def test_padded_groups_hold_no_more_than_their_share() -> None:
    batch = batch_of(SPANS)
    groups, _ = padded_rows(batch, most=15)
    assert [group.tokens.shape for group in groups] == [(2, 7), (2, 5)]
    assert [len(group.tokens) for group in padded_rows(batch, most=0)[0]] == [1, 1, 1, 1]


def test_padded_rows_lead_back_to_every_token() -> None:
    batch = batch_of(SPANS)
    groups, back = padded_rows(batch, most=15)
    flat = torch.cat([group.tokens.flatten() for group in groups])
    assert torch.equal(flat[back][:-2], batch.tokens[:-2])


def order_of_layers(path: Any) -> tuple[list[int], list[int]]:
    """Which layers ran on this rank, forward and backward, where ranks have unequal work."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    causal = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=200, num_hidden_layers=2, **sizes)
    )
    forward: list[int] = []
    backward: list[int] = []

    def meet(order: list[int], index: int) -> None:
        # As ZeRO-3 does with a layer's weights; unequal numbers of passes would hang here.
        distributed.all_reduce(torch.ones(1))
        order.append(index)

    for index, layer in enumerate(causal.model.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: meet(forward, index))
        layer.register_full_backward_pre_hook(lambda *_, index=index: meet(backward, index))
    register_sharding(Shards(causal.parameters()))
    module = PackedModel(causal, path=path)
    batch = batch_of(SPANS if distributed.get_rank() == 0 else ())
    read = module(batch, lambda hidden, head, batch: {"sum": hidden.sum()})
    read["sum"].backward()
    return forward, backward


def test_ranks_with_unequal_rows_make_equally_many_passes(pair: Any) -> None:
    for path, passes in (("separate", 4), ("padded", 2)):
        first, second = pair.run(order_of_layers, path)
        assert first == second == ([0, 1] * passes, [1, 0] * passes)


def test_a_row_in_whole_blocks_holds_the_same_trees() -> None:
    batch = batch_of(SPANS)
    row = rounded_up(batch, BLOCK)
    assert len(row.tokens) == 128
    assert torch.equal(row.tokens[: len(batch.tokens)], batch.tokens)
    assert row.example[len(batch.tokens) :].tolist() == [-1] * (128 - len(batch.tokens))
    assert rounded_up(row, BLOCK) is row


def test_padded_groups_without_images_get_a_copy_of_a_row_with_images() -> None:
    pixels = {"pixels": torch.ones(1, 1)}
    text = {"pixels": torch.ones(0, 1)}
    examples = [
        Example([1] * 6, [Answer([2])], {}, text),
        Example([7], [Answer([8, 9])], {}, pixels),
    ]
    batch = pack(examples, [0, 1])
    groups, back = padded_rows(batch, most=7)
    assert [group.tokens.tolist() for group in groups] == [
        [[1, 1, 1, 1, 1, 1, 2], [7, 8, 9, 0, 0, 0, 0]],
        [[7, 8, 9]],
    ]
    assert [group.inputs["pixels"].shape for group in groups] == [(1, 1), (1, 1)]
    flat = torch.cat([group.tokens.flatten() for group in groups])
    assert torch.equal(flat[back], batch.tokens)
    assert back[7:].tolist() == [14, 15, 16]


def test_unfolded_rows_keep_the_sizes_of_their_images_on_the_host() -> None:
    sizes = [torch.tensor([[2, number]]) for number in (4, 6)]
    examples = [Example([1], [Answer([2]), Answer([3])], {}, {"sizes": own}) for own in sizes]
    batch = pack(examples, [0, 1])
    rows = [[2, 4], [2, 4], [2, 6], [2, 6]]
    assert not hasattr(unshared(batch)[0].inputs["sizes"], "host")
    batch = batch.to("cpu")
    assert unshared(batch)[0].inputs["sizes"].host.tolist() == rows
    groups, _ = padded_rows(batch, most=4)
    assert [group.inputs["sizes"].host.tolist() for group in groups] == [rows[:2], rows[2:]]
