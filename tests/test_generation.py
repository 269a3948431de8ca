"""Sampled answers: they end where trained ones do, on ranks that end at different lengths too."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import sft_runs
from rlhf.launch.places import Marker
from rlhf.rank.dataset import prepare_data
from rlhf.rank.generate import sample
from rlhf.rank.set_up import set_up
from rlhf.registry.gateway import load_hooks
from rlhf.request.reader import read_config
from rlhf.testing import layouts
from rlhf.testing.ranks import Ranks
from sft_runs import Inputs

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|system|>{{ '\n' }}{% endfor %}"
"""A template that, like ChatML on a base model, ends turns with a token that is not EOS."""
BEGIN, EOS, END = 1, 2, 5
CHAIN = (20, 21, 22, 23, 24, 25, END, 40, BEGIN)


@pytest.fixture(scope="module")
def chained(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words of a run whose model writes the tokens of CHAIN in this order, and the last one
    forever."""
    folder = tmp_path_factory.mktemp("generation")
    model: Any = LlamaForCausalLM.from_pretrained(inputs.model)
    model.config.tie_word_embeddings = False
    table = model.model.embed_tokens.weight.detach()
    unit = torch.nn.functional.normalize(table, dim=1)
    head = torch.zeros_like(table)
    for token, following in zip(CHAIN, [*CHAIN[1:], CHAIN[-1]], strict=True):
        head[following] += unit[token]
    model.lm_head.weight = torch.nn.Parameter(head)
    for layer in model.model.layers:
        # Hidden states are then the embeddings.
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    for file in inputs.model.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    model.config.use_cache = False  # As other trainers leave it behind.
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    (folder / "turns.jinja").write_text(TURNS)
    template = str(folder / "turns.jinja")
    return sft_runs.words(
        inputs, folder / "run", "--model", str(folder), "--data.chat_template", template
    )


def answers(words: list[str], cache: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Draws at a temperature that leaves nothing to chance, from an engine of the run."""
    os.environ["RLHF_CACHE"] = cache
    request = read_config("sft", overrides=words)
    hooks, observers = load_hooks(request.config)
    data = prepare_data(request)
    mesh = hooks.setup_mesh(config=request.config)
    output = Path(request.config.output or "")
    session = set_up(request, data, mesh, hooks, observers, output, None, Marker(None, 0))
    drawn = sample(
        session.engine, prompts, hooks, mesh, session.trainer.tokenizer,
        seeds=range(len(prompts)), max_new_tokens=9, temperature=1e-4, tokens=tokens,
    )  # fmt: skip
    hooks.close_mesh(mesh=mesh)
    return drawn


@pytest.mark.parametrize("stage", ["stage 0", "stage 3"])
def test_ranks_sample_together_though_answers_end_at_different_lengths(
    stage: str, inputs: Inputs, chained: list[str], two: Ranks
) -> None:
    # Two prompts fit into 26 tokens, so rank 0 has two groups and rank 1 has one.
    prompts = [[9, 9, 9, 20], [9, 9, 22], [9, 24], [25], [40]]
    expected = [[21, 22, 23, 24, 25, END], [23, 24, 25, END], [25, END], [END], [BEGIN] * 9]
    words = [*chained, *layouts()[stage]]
    assert two.run(answers, words, str(inputs.cache), prompts, 26) == [expected] * 2


def test_an_answer_ends_with_the_trained_turn_though_it_is_not_eos(
    inputs: Inputs, chained: list[str], one: Ranks
) -> None:
    (found,) = one.run(answers, chained, str(inputs.cache), [[9, 24], [25]], 512)
    assert found == [[25, END], [END]]
