"""Recurrent layers over packed rows: the parts of a row are independent of one another."""

import copy
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers

from rlhf.data.batch import PackedBatch
from rlhf.data.packing import blank_batch, filler
from rlhf.engine import Mesh
from rlhf.model.masks import Tree
from rlhf.model.packed import BareEngine, PackedModel
from rlhf.model.probe import choose_path
from rlhf.readouts import token_logprobs
from rlhf_devkit.families import FAMILIES, VOCABULARY, gradients, tree_batch
from rlhf_kernels.recurrent import Segment, Segments
from rlhf_kernels.scans import Scans

HYBRIDS = ("Qwen3.5", "Bamba", "LFM2")
"""A family for each kind of recurrent layer."""


@cache
def family(name: str) -> PackedModel:
    """A tiny random model, on the path that the probe has chosen."""
    config, options = FAMILIES[name]
    torch.manual_seed(0)
    causal: Any = transformers.AutoModelForCausalLM
    model = causal.from_config(getattr(transformers, config)(**options))
    for parameter in model.parameters():
        # Biases and norms start at 0 and 1, where a wrong use of them does not show.
        parameter.data += 0.1 * torch.randn_like(parameter)
    module = PackedModel(model.eval())
    choose_path(engine_of(module, "fp32"), Mesh())
    return module


def engine_of(module: PackedModel, precision: str) -> Any:
    return BareEngine(module=module, device=torch.device("cpu"), precision=precision)


def test_a_prompt_is_computed_once_and_a_chain_in_one_part() -> None:
    batch = blank_batch(torch.zeros(24, dtype=torch.long), ((3, (2, 4)), (2, (5,)), (0, (1, 2))))
    assert Segments(Tree(batch), Scans()).segments == [
        Segment(range(3), None), Segment(range(3, 5), 0), Segment(range(5, 9), 0),
        Segment(range(9, 16), None), Segment(range(16, 17), None), Segment(range(17, 19), None),
        Segment(range(19, 24), None),
    ]  # fmt: skip


def test_a_convolution_reads_the_tokens_before_on_the_path() -> None:
    batch = blank_batch(torch.zeros(6, dtype=torch.long), ((1, (2, 3)),))
    places, back = Segments(Tree(batch), Scans()).paths(2)
    # 6 is the place of zeros before a path.
    assert places.tolist() == [6, 6, 0, 6, 0, 1, 2, 6, 0, 3, 4, 5]
    assert places[back].tolist() == list(range(6))


def test_tokens_are_linked_along_their_paths() -> None:
    batch = blank_batch(torch.zeros(9, dtype=torch.long), ((2, (2, 3)), (0, (2,))))
    before, later, offsets = Segments(Tree(batch), Scans()).links(3)
    assert before.tolist() == [
        [-1, 0, 1, 2, 1, 4, 5, -1, 7],
        [-1, -1, 0, 1, 0, 1, 4, -1, -1],
        [-1, -1, -1, 0, -1, 0, 1, -1, -1],
    ]
    # Tokens and steps of the second answer, behind the first one: 4 and 5 see the prompt's 0 and 1.
    after = [divmod(entry, 4) for entry in later.tolist()]
    assert [after[a:b] for a, b in pairwise(offsets.tolist())] == [
        [(4, 2), (5, 3)], [(4, 1), (5, 2), (6, 3)], [], [], [], [], [], [], [],
    ]  # fmt: skip


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_tree_does_not_depend_on_the_others_of_its_row(name: str) -> None:
    module = family(name)
    tokens = torch.randint(3, VOCABULARY, (120,), generator=torch.Generator().manual_seed(1))
    spans = ((13, (11, 9)), (70, (6, 3)))
    with torch.no_grad():
        both = module.hidden(blank_batch(tokens, spans))[:33]
        alone = module.hidden(blank_batch(tokens[:33], spans[:1]))
    torch.testing.assert_close(both, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_tree_computes_no_padding_and_a_prompt_once(name: str) -> None:
    module = copy.deepcopy(family(name))
    sizes: list[int] = []
    embedding = module.causal.get_input_embeddings()
    embedding.register_forward_hook(lambda _, inputs, output: sizes.append(inputs[0].numel()))
    batch = tree_batch()
    for path in ("tree", "padded"):
        module.path = path
        with torch.no_grad():
            module.hidden(batch)
    row, *padded = sizes
    assert row == len(batch.tokens) == 80
    assert sum(padded) == 108


@pytest.mark.parametrize("name", HYBRIDS)
def test_recomputed_layers_give_the_same_gradients(name: str) -> None:
    found = []
    for recompute in (False, True):
        module = copy.deepcopy(family(name)).train()
        if recompute:
            module.causal.gradient_checkpointing_enable({"use_reentrant": False})
        module(tree_batch(), token_logprobs)["logprobs"].sum().backward()
        found.append(gradients(module.causal))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_filler_batch_gives_every_weight_a_gradient(name: str) -> None:
    module = copy.deepcopy(family(name))
    assert gradients_of(module, filler()) == gradients_of(module, tree_batch())


def gradients_of(module: PackedModel, batch: PackedBatch) -> set[str]:
    """Return the names of the weights that get a gradient."""
    module(batch, lambda hidden, *_: {"sum": hidden.sum()})["sum"].backward()
    return set(gradients(module.causal))


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_rehearsal_needs_no_values(name: str) -> None:
    module = copy.deepcopy(family(name)).to("meta")
    assert module.hidden(tree_batch().to("meta")).is_meta


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_probe_chooses_the_tree_in_bf16(name: str) -> None:
    module = PackedModel(copy.deepcopy(family(name).causal).bfloat16())
    choice = choose_path(engine_of(module, "bf16"), Mesh())
    assert (choice.path, choice.reason) == ("tree", "")
