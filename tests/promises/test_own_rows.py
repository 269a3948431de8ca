"""A trainer with rows of its own tokenises them as core does, and its errors name the row."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import rlhf_demo
from rlhf.config.sections import Config, DataConfig, DataEntry
from rlhf.data.tokenise import prepare
from rlhf.errors import RLHFError
from rlhf.trainer import Example, Loss, Trainer
from rlhf_rows import encode


class BestAnswer(Trainer):
    """Rows with several answers and their votes."""

    def example(self, row: Any) -> Example:
        if not {"question", "answers", "votes"} <= row.keys():
            raise RLHFError("a row needs `question`, `answers` and `votes`")
        encoded = encode(self.tokenizer, row["question"], *row["answers"])
        return Example(encoded.prompt, encoded.answers, {"votes": row["votes"]})

    def setup(self, run: Any) -> None:
        raise AssertionError("no model is needed")

    def loss(self, batch: Any) -> Loss:
        raise AssertionError("no loss is needed")


def test_a_trainer_tokenises_its_own_rows_and_its_errors_name_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(rlhf_demo.base_model_folder())
    trainer = BestAnswer(None, tokenizer)

    def examples(row: dict[str, Any]) -> Any:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row))
        config = Config(data=DataConfig(train=(DataEntry(path=str(path)),)))
        return prepare(config, trainer, tokenizer, which="train")

    row = {"question": "1 + 1 =", "answers": [" 2", " 3"], "votes": [5.0, 1.0]}
    (example,) = examples(row)
    assert tokenizer.decode(example.prompt) == "1 + 1 ="
    answers = [tokenizer.decode(answer.tokens) for answer in example.answers]
    assert answers == [" 2" + tokenizer.eos_token, " 3" + tokenizer.eos_token]
    assert list(example.values["votes"]) == [5.0, 1.0]
    with pytest.raises(RLHFError) as caught:
        examples({"question": "1 + 1 =", "answers": [" 2"]})
    assert str(caught.value) == (
        f"{tmp_path}/rows.jsonl line 1: a row needs `question`, `answers` and `votes`"
    )
