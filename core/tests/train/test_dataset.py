"""What is checked of a run's rows before a model is loaded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from numbered_words import ROWS, Demonstrations, examples_of, word_tokenizer, write_lines

from rlhf.config.sections import Config, ModelConfig
from rlhf.errors import RLHFError
from rlhf.train import dataset

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize("known", [42, 13])
def test_tokens_with_embeddings_pass(
    known: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(known, tmp_path, monkeypatch)


def test_a_row_format_may_make_tokens_that_the_tokenizer_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer has fewer tokens than the model, and the format makes others."""
    tokenizer = word_tokenizer()
    monkeypatch.setattr(tokenizer, "get_vocab", lambda: {"w0": 0})
    with pytest.raises(RLHFError) as error:
        check(12, tmp_path, monkeypatch, tokenizer=tokenizer)
    assert str(error.value).startswith(
        f"{tmp_path}/rows.jsonl line 10: tiny has embeddings for 12 tokens but none for 'w10' (12)"
    )


def check(
    known: int, folder: Path, monkeypatch: pytest.MonkeyPatch, *, tokenizer: Any = None
) -> None:
    """Check rows of the tokens 1 to 12 for a model with embeddings for the first `known`."""
    monkeypatch.setattr(dataset, "known_tokens", lambda config: known)
    trainer = Demonstrations(None, tokenizer or word_tokenizer())
    examples = examples_of(write_lines(folder / "rows.jsonl", ROWS))
    data: Any = SimpleNamespace(trainer=trainer, parts={"train": examples})
    dataset._check_tokens(data, Config(model=ModelConfig(path="tiny")))
