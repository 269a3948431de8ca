"""Masks against the rule in words, and attention on the CPU."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from rlhf.data.batch import PackedBatch
from rlhf.data.packing import blank_batch
from rlhf.model import attention
from rlhf.model.masks import Scoring, Tree, TreeMask, TreeTokens, lowest_visible
from rlhf.model.packed import PackedModel

SPANS = (
    ((5, (3, 4)), (0, (6,)), (7, (2, 2, 9))),
    ((200, (90, 130)), (0, (40,)), (3, (300,)), (260, (5, 5, 5))),
    ((1000, (24,)),),
    (),
)
KINDS: dict[str, Any] = {
    "full": None,
    "sliding": sliding_window_causal_mask_function(6),
    "wide": sliding_window_causal_mask_function(150),
    "chunked": chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long)),
}


def batch_of(spans: Any, multiple: int = 128) -> PackedBatch:
    total = sum(prompt + sum(answers) for prompt, answers in spans) or 1
    total = -(-total // multiple) * multiple
    generator = torch.Generator().manual_seed(0)
    return blank_batch(torch.randint(0, 50, (total,), generator=generator), spans)


def mask_of(batch: PackedBatch, kind: str) -> TreeMask:
    tree, function = Tree(batch), KINDS[kind]
    return TreeMask(tree, None if function is None else lowest_visible(tree, function))


def in_words(batch: PackedBatch, kind: str) -> Tensor:
    """The rule token by token [T, T]."""
    size, function = len(batch.tokens), KINDS[kind]
    visible = torch.zeros(size, size, dtype=torch.bool)
    none = torch.zeros(1, dtype=torch.long)
    for query, key in itertools.product(range(size), repeat=2):
        if key > query or batch.example[query] != batch.example[key]:
            continue
        if batch.example[query] < 0:
            visible[query, key] = query == key
        elif batch.branch[key] in (0, batch.branch[query]):
            seen = function is None or function(
                none, none, batch.positions[query : query + 1], batch.positions[key : key + 1]
            )
            visible[query, key] = bool(seen)
    return visible


def whole(mask: TreeMask) -> Tensor:
    row = torch.arange(len(mask.tree.owner), device=mask.tree.owner.device)
    return mask.visible(row[:, None], row[None, :])


@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_is_the_rule_of_the_tree_in_words(kind: str) -> None:
    batch = batch_of(SPANS[0], multiple=20)
    torch.testing.assert_close(whole(mask_of(batch, kind)), in_words(batch, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("multiple", [128, 50])
def test_the_bounds_of_a_key_hold_all_that_see_it_and_none_that_does_not(
    spans: Any, kind: str, multiple: int
) -> None:
    mask = mask_of(batch_of(spans, multiple), kind)
    sees, row = whole(mask), torch.arange(len(mask.tree.owner))
    last = torch.where(sees, row[:, None], -1).amax(0)
    _, _, _, seen_to, all_see_to = mask.bounds
    assert torch.equal(seen_to, last.int() + 1)
    assert (all_see_to > row).all()
    for key in row.tolist():
        assert sees[key : all_see_to[key], key].all()


def test_a_sink_takes_its_share_of_the_softmax() -> None:
    query, key, value = (torch.randn(1, 2, 5, 4) for _ in range(3))
    sinks = torch.tensor([0.5, -1.0])
    plain, sunk = (
        attention.attend_example(query, key, value, None, Scoring(0.0, 0.5, None, each))
        for each in (None, sinks)
    )
    scores = (query @ key.transpose(2, 3) * 0.5).masked_fill(
        ~torch.ones(5, 5, dtype=torch.bool).tril(), float("-inf")
    )
    kept = torch.sigmoid(scores.logsumexp(-1) - sinks.view(1, 2, 1))
    torch.testing.assert_close(sunk, plain * kept[..., None])


def test_casts_and_views_keep_the_tree_and_other_changes_drop_it() -> None:
    tree = Tree(batch_of(SPANS[0], multiple=20))
    mask = TreeTokens.of(tree)
    assert mask.to(dtype=torch.bool).tree is tree
    assert mask.view(1, -1).tree is tree
    assert mask.to(torch.long).tree is tree
    assert not hasattr(mask[:, :4], "tree")
    assert not hasattr(mask & mask, "tree")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_whether_all_tokens_are_seen_is_known_on_the_host(device: str, dtype: torch.dtype) -> None:
    batch = batch_of(SPANS[0], multiple=20)
    tree = Tree(batch)
    tree.owner = tree.owner.to(device)
    mask = TreeTokens.of(tree).to(dtype)
    with NoRead():
        assert torch.all(mask == 1)
        assert (mask == 1).dtype == torch.bool


def test_other_questions_about_a_mask_have_their_own_answers() -> None:
    mask = TreeTokens.of(Tree(batch_of(SPANS[0], multiple=20)))
    assert not torch.all(mask == 0)
    assert not torch.all(mask.long() == 2)
    assert not torch.all(mask != 1)
    assert not torch.all(mask == torch.zeros_like(mask))
    assert not torch.all(mask & torch.zeros_like(mask))
    assert torch.all(mask, dim=0).shape == mask.shape[1:]
    assert torch.all(mask == 1, 1).shape == (1,)


class NoRead(TorchDispatchMode):
    """Fails where a value of a mask is read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten.eq.Scalar, torch.ops.aten.all.default), func
        return func(*args, **kwargs or {})


def tiny_llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        initializer_range=0.2,
        **options,
    )
    return AutoModelForCausalLM.from_config(config)


def test_generation_and_padded_rows_are_handed_over_to_sdpa() -> None:
    causal = tiny_llama().eval()
    tokens = torch.tensor([[7, 7, 7, 1, 2, 3], [4, 5, 6, 7, 8, 9]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    own = causal.generate(input_ids=tokens, pad_token_id=0, **options)
    module = PackedModel(causal)
    assert causal.config._attn_implementation == attention.NAME
    ours = module.model.generate(input_ids=tokens, pad_token_id=0, **options)
    assert torch.equal(own, ours)


def test_recomputation_changes_neither_hidden_states_nor_gradients() -> None:
    batch = batch_of(SPANS[0], multiple=20)
    found = []
    for recompute in (False, True):
        module = PackedModel(tiny_llama()).train()
        if recompute:
            module.causal.gradient_checkpointing_enable({"use_reentrant": False})
        hidden = module(batch, lambda hidden, head, batch: {"hidden": hidden})["hidden"]
        hidden[:36].square().sum().backward()
        found.append((hidden.detach(), module.causal.model.embed_tokens.weight.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_filler_runs_and_backward_reaches_every_layer() -> None:
    for path in ("tree", "packed", "padded", "separate"):
        module = PackedModel(tiny_llama(), path=path)
        read = module(batch_of(()), lambda hidden, head, batch: {"hidden": hidden[:0]})
        read["hidden"].sum().backward()
        grads = [p.grad for p in module.causal.model.layers.parameters()]
        assert all(grad is not None and not grad.any() for grad in grads)


@pytest.mark.parametrize("scaling", [None, 0.3])
def test_patches_see_those_of_their_image(scaling: float | None) -> None:
    lengths = [6, 1, 9]
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(3, 1, 2, sum(lengths), 8, generator=draw)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    module = torch.nn.Module()
    options = {"cu_seq_lens_q": bounds, "max_length_q": 9, "scaling": scaling}
    found, _ = attention.image_attention(module, *states, None, **options)
    scores = states[0] @ states[1].transpose(2, 3) * (scaling or 8**-0.5)
    image = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    scores = scores.masked_fill(image[:, None] != image, -torch.inf)
    expected = (scores.softmax(-1) @ states[2]).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    whole, _ = attention.image_attention(module, *states[..., :6, :], None, scaling=scaling)
    torch.testing.assert_close(whole, expected[:, :6])
    meta, _ = attention.image_attention(module, *states.to("meta"), None, **options)
    assert meta.shape == expected.shape


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_heads_of_images_may_share_keys(device: str) -> None:
    draw = torch.Generator().manual_seed(0)
    query, *shared = torch.randn(3, 1, 4, 10, 8, generator=draw).to(device)
    key, value = (states[:, :2] for states in shared)
    options = {"cu_seq_lens_q": torch.tensor([0, 4, 10]), "max_length_q": 6}
    module = torch.nn.Module()
    found, _ = attention.image_attention(module, query, key, value, None, **options)
    repeated = [states.repeat_interleave(2, 1) for states in (key, value)]
    expected, _ = attention.image_attention(module, query, *repeated, None, **options)
    assert found.shape == expected.shape == (1, 10, 4, 8)
    assert device == "meta" or torch.equal(found, expected)


def test_attention_of_images_has_the_dropout_of_its_tower() -> None:
    states = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, 2, 6])
    found, _ = attention.image_attention(
        torch.nn.Module(), *states, None, cu_seq_lens_q=bounds, max_length_q=4, dropout=1.0
    )
    assert not found.any()
