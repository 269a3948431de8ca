"""The trainer with rows of its own in docs/plugins.md."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rlhf import demo
from rlhf.config.sections import Config, DataConfig, DataEntry
from rlhf.data.tokenise import prepare
from rlhf.errors import RLHFError

DOCS = Path(__file__).parents[1] / "docs" / "plugins.md"


def test_the_trainer_of_the_docs_reads_rows_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    blocks = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if "BestAnswerTrainer" in block]
    names: dict[str, Any] = {"__name__": "best_answer"}
    exec(block, names)
    tokenizer = AutoTokenizer.from_pretrained(demo.base_model_folder())
    trainer = names["BestAnswerTrainer"](None, tokenizer)

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
