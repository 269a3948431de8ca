"""Answers that end where trained ones do."""

from typing import Any

import pytest
import torch

from rlhf.loop.session import Session
from rlhf.run.generate import generate, sample
from rlhf.testing import tiny

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|system|>{{ '\n' }}{% endfor %}"
"""A template that, like ChatML on a base model, ends turns with a token that is not EOS."""
END, BEGIN = 5, 1


def chain(session: Session, *tokens: int) -> None:
    """Have the model write these tokens one after another, and the last for ever."""
    causal: Any = session.engine.module.causal
    causal.config.tie_word_embeddings = False
    table = causal.model.embed_tokens.weight
    with torch.no_grad():
        for layer in causal.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        unit = torch.nn.functional.normalize(table, dim=1)
        causal.lm_head.weight = torch.nn.Parameter(torch.zeros_like(table))
        for before, after in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
            causal.lm_head.weight[after] += unit[before]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("generate")
    (folder / "turns.jinja").write_text(TURNS)
    words = [
        *tiny.short_run(folder, "demonstration"), "--output", str(folder / "run"),
        "--data.chat_template", str(folder / "turns.jinja"),
    ]  # fmt: skip
    _, session, _ = tiny.in_plain_torch("sft", words, str(folder / "cache"))
    chain(session, 20, 30, END, 40, BEGIN)
    return session


def test_an_answer_ends_with_the_trained_turn_though_it_is_not_eos(session: Session) -> None:
    assert session.trainer.tokenizer.eos_token_id != END
    engine, hooks, tokenizer = session.engine, session.hooks, session.trainer.tokenizer
    found = generate(engine, [[9, 20], [30]], hooks, tokenizer, max_new_tokens=6)
    assert found == [[30], []]
    drawn = sample(
        engine, [[9, 20], [30]], hooks, session.mesh, tokenizer,
        seeds=[1, 2], max_new_tokens=6, temperature=1e-4, tokens=512,
    )  # fmt: skip
    assert drawn == [[30, END], [END]]


def test_an_answer_that_never_ends_is_as_long_as_it_may_be(session: Session) -> None:
    found = generate(
        session.engine, [[40]], session.hooks, session.trainer.tokenizer, max_new_tokens=3
    )
    assert found == [[BEGIN] * 3]
