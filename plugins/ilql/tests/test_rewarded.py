"""The row format `rewarded`: which rows it reads, and what it says of others."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from rlhf.errors import RLHFError
from rlhf.trainer import Row
from rlhf_demo import base_model_folder
from rlhf_plugin_ilql.rewarded import rewarded
from rlhf_rows import read_row

TOKENIZER = AutoTokenizer.from_pretrained(base_model_folder())


def read(row: dict[str, Any]) -> Row:
    (found,) = read_row(rewarded, row, TOKENIZER)
    return found


def texts(row: Row) -> tuple[str, list[str]]:
    return TOKENIZER.decode(row.prompt), [TOKENIZER.decode(it.tokens) for it in row.answers]


def test_answers_share_their_prompt() -> None:
    row = {"prompt": "1 + 1 =", "rewards": [1, -0.5]}
    for name in ("completions", "answers"):
        found = read({**row, name: [" 2", " 3"]})
        assert texts(found) == ("1 + 1 =", [" 2<|end|>", " 3<|end|>"])
        assert found.columns["rewards"] == [1.0, -0.5]


def test_one_answer_has_one_reward() -> None:
    found = read({"prompt": "1 + 1 =", "completion": " 2", "reward": True})
    assert texts(found) == ("1 + 1 =", [" 2<|end|>"])
    assert found.columns["rewards"] == [1.0]


def test_conversations_are_rendered_by_the_chat_template() -> None:
    turns = [{"role": "user", "content": "1 + 1?"}]
    found = read({"prompt": turns, "completion": "2", "reward": 0.5})
    assert texts(found) == ("<|begin|><|user|>1 + 1?<|assistant|>", ["2<|end|>"])


def test_samples_of_trlx_are_texts_or_dialogues() -> None:
    assert texts(read({"sample": "all of it", "reward": 2})) == ("", ["all of it<|end|>"])
    found = read({"sample": ["Q1", "A1", "Q2", "A2"], "reward": 2})
    assert texts(found) == ("Q1", ["A1Q2A2<|end|>"])
    trained = [token for token, own in zip(*_masked(found), strict=True) if own]
    assert TOKENIZER.decode(trained) == "A1A2<|end|>"


def _masked(row: Row) -> tuple[Any, Any]:
    (answer,) = row.answers
    return answer.tokens, answer.trained


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"prompt": "a", "completion": "b", "reward": float("nan")},
            "the row: the reward nan is not a number up to 1e18; correct it",
        ),
        (
            {"prompt": "a", "completion": "b", "reward": "1"},
            "the row: the reward '1' is not a number up to 1e18; correct it",
        ),
        (
            {"prompt": "a", "completions": [], "rewards": []},
            "the row: `completions` is empty; remove the row",
        ),
        (
            {"prompt": "a", "completions": ["b", "c"], "rewards": [1]},
            "the row: 1 reward for 2 answers; give one per answer",
        ),
        (
            {"prompt": "a", "answers": ["b"], "rewards": 1},
            "the row: `rewards` must be a list, not int",
        ),
        (
            {"sample": ["a", "b", "c"], "reward": 1},
            "the row: `sample` has 3 texts; give an answer for each prompt",
        ),
        (
            {"sample": [1], "reward": 1},
            "the row: `sample` must be text or a list of texts: prompt, answer, prompt, ...",
        ),
        (
            {"prompt": "a", "completion": "b"},
            "the row: a row needs `prompt`, `completion` and `reward`, or `prompt`, `completions` "
            "and `rewards`, but this one has `prompt`, `completion`; rename columns with `columns` "
            "in data",
        ),
    ],
)
def test_what_a_row_lacks_is_named(row: dict[str, Any], text: str) -> None:
    with pytest.raises(RLHFError) as error:
        read(row)
    assert str(error.value) == text
