"""Rows as well-known data sets publish them: small ones made here, and the real files where they
are."""

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import AutoTokenizer
from word_rows import WHERE, Section

from rlhf import demo
from rlhf.config.sections import BatchConfig, Config, DataConfig, DataEntry
from rlhf.data.columns import RawRow
from rlhf.data.convert import MARK, converted
from rlhf.data.example import Example
from rlhf.data.stepwise import label_per_token
from rlhf.data.tokenise import prepare
from rlhf.data.tokens import Row
from rlhf.errors import RLHFError
from rlhf.trainer import Trainer

FORMATS = Path(__file__).parents[3] / "shared" / "data" / "formats"
real = pytest.mark.skipif(not FORMATS.exists(), reason="the shared rows are not here")
pytestmark = pytest.mark.usefixtures("cache")


class Plain(Trainer):
    """Takes the rows of any format as they come."""

    seen: ClassVar[list[Row]] = []

    def example(self, row: Any) -> Example:
        self.seen.append(row)
        values = {"label": [label_per_token(row)]} if self.row_format == "stepwise" else {}
        return Example(row.prompt, row.answers, values)

    def setup(self, run: Any) -> None: ...
    def loss(self, batch: Any) -> Any: ...


def made(format: str, entry: DataEntry, **data: Any) -> tuple[list[Row], Any, Any]:
    """The rows, the examples and the tokenizer of one entry, with the demo's base model."""
    trainer_class = type("OfFormat", (Plain,), {"row_format": format, "seen": []})
    data = {"max_tokens": 1 << 14, "processes": 1, **data}
    config = Config(data=DataConfig(train=(entry,), **data), batch=BatchConfig(tokens=1 << 14))
    tokenizer = AutoTokenizer.from_pretrained(demo.base_model_folder())
    trainer = trainer_class(Section(separator="\n"), tokenizer)
    examples = prepare(config, trainer, tokenizer, which="train")
    return trainer.seen, examples, tokenizer


def convert(name: str, columns: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(row.columns) for row in converted(RawRow(WHERE, columns), name)]


def judged(text: str, rating: int | None) -> dict[str, Any]:
    return {"text": text, "rating": rating, "flagged": False}


def test_prm800k_is_its_chosen_path_and_each_completion_that_was_not_chosen() -> None:
    steps = [
        {"completions": [judged("a", 1)], "chosen_completion": 0, "human_completion": None},
        {
            "completions": [judged("b", -1), judged("c", None)],
            "chosen_completion": None,
            "human_completion": {"text": "d", "rating": None},
        },
        {
            "completions": [judged("e", 0), judged("f", 1)],
            "chosen_completion": 0,
            "human_completion": None,
        },
        {"completions": None, "chosen_completion": None, "human_completion": None},
    ]
    row = {"question": {"problem": "What?"}, "label": {"steps": steps}}
    assert convert("prm800k", row) == [
        {"prompt": "What?\n", "completions": ["a", "d", "e"], "labels": [1.0, 1.0, 1.0]},
        {"prompt": "What?\n", "completions": ["a", "b"], "labels": [None, 0.0]},
        {"prompt": "What?\n", "completions": ["a", "d", "f"], "labels": [None, None, 1.0]},
    ]
    assert convert("prm800k", {**row, "label": {"steps": []}}) == []


def test_math_shepherd_is_its_steps_and_the_signs_in_place_of_the_marks() -> None:
    row = {
        "input": f"What is 1 + 1? Step 1: It is 2. {MARK}\nStep 2: The answer is: 3 {MARK}",
        "label": "What is 1 + 1? Step 1: It is 2. +\nStep 2: The answer is: 3 -",
        "task": "GSM8K",
    }
    assert convert("math_shepherd", row) == [
        {
            "prompt": "What is 1 + 1?\n",
            "completions": ["Step 1: It is 2.", "Step 2: The answer is: 3"],
            "labels": [True, False],
        }
    ]


def test_sharegpt_is_messages_with_roles() -> None:
    talk = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    assert convert("sharegpt", {"conversations": talk}) == [{"messages": messages}]
    assert convert("sharegpt", {"conversations": talk, "system": "Be kind"}) == [
        {"messages": [{"role": "system", "content": "Be kind"}, *messages]}
    ]
    pair = {"conversations": talk[:1], "chosen": talk[1], "rejected": [talk[1]]}
    assert convert("sharegpt", pair) == [
        {"prompt": messages[:1], "chosen": messages[1:], "rejected": messages[1:]}
    ]


NEEDS = (
    "a row needs {} for convert: {}, but this one has `text`; rename columns with `columns` in data"
)
REFUSED = [
    ("prm800k", {"text": "a"}, NEEDS.format("`question` and `label`", "prm800k")),
    ("math_shepherd", {"text": "a"}, NEEDS.format("`input` and `label`", "math_shepherd")),
    ("sharegpt", {"text": "a"}, NEEDS.format("`conversations`", "sharegpt")),
    (
        "math_shepherd",
        {"input": f"What? Step 1: a {MARK}", "label": "What? Step 1: a ?"},
        "`label` has '?' where `input` has mark 0, not + or -; remove the row",
    ),
    (
        "math_shepherd",
        {"input": f"What? a {MARK}", "label": "What? a +"},
        "`input` has no 'Step 1:' with a mark; remove the row",
    ),
    (
        "sharegpt",
        {"conversations": [{"role": "user"}]},
        "convert: sharegpt takes messages with `from` and `value`, not {'role': 'user'}",
    ),
]


@pytest.mark.parametrize(("name", "columns", "message"), REFUSED)
def test_a_row_of_another_shape_is_named(name: str, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(RLHFError) as caught:
        convert(name, columns)
    assert str(caught.value) == f"{WHERE}: {message}"


def test_a_row_may_become_several_examples_or_none(tmp_path: Path) -> None:
    step = {"completions": [judged("a", 1), judged("b", -1)], "chosen_completion": 0}
    rows = [{"question": {"problem": "What?"}, "label": {"steps": s}} for s in ([step], [])]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, examples, _ = made("stepwise", DataEntry(path=str(path), convert="prm800k"))
    assert examples.row_numbers.tolist() == [0, 0]
    assert examples.report.lost == {"empty": (f"{path} line 2",)}
    assert examples.name(1) == f"{path} line 1"
    assert examples.counts["labels"].tolist() == [1, 1]


@real
def test_the_real_prm800k_is_read() -> None:
    entry = DataEntry(path=str(FORMATS / "prm800k_raw.jsonl"), convert="prm800k")
    rows, examples, tokenizer = made("stepwise", entry)
    # 41 steps on the chosen paths of 6 problems, 1 without any choice, and 31 other completions.
    assert examples.report.rows == 6
    labels = [x for row in rows for x in row.columns["labels"] if not math.isnan(x)]
    assert examples.report.labels == len(labels)
    first = rows[0]
    assert tokenizer.decode(first.prompt).endswith("what is the cost of a pencil?\n")
    assert first.columns["completions"][1] == "We have $3p+e=1.24$ and $5p+e=1.82$."


@real
def test_the_real_math_shepherd_is_read() -> None:
    entry = DataEntry(path=str(FORMATS / "math_shepherd_raw.jsonl"), convert="math_shepherd")
    rows, examples, _ = made("stepwise", entry)
    assert [len(row.columns["ends"]) for row in rows] == [5, 3, 2, 5, 5, 2, 3]
    assert rows[0].columns["labels"] == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert rows[0].columns["completions"][4].startswith("Step 5: She spends 260 * 52")
    assert examples.report.labels == 25


@real
def test_the_real_hh_pairs_are_cut_after_the_last_shared_speaker() -> None:
    path = FORMATS / "hh_raw.jsonl"
    rows, _, tokenizer = made("preference", DataEntry(path=str(path)))
    published = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == len(published) == 30
    for row, pair in zip(rows, published, strict=True):
        prompt = tokenizer.decode(row.prompt)
        assert prompt.endswith("\n\nAssistant:")
        for answer, name in zip(row.answers, ("chosen", "rejected"), strict=True):
            assert prompt + tokenizer.decode(answer.tokens) == pair[name] + tokenizer.eos_token


@real
def test_the_real_gsm8k_needs_two_renames() -> None:
    names = {"prompt": "question", "completion": "answer"}
    entry = DataEntry(path=str(FORMATS / "gsm8k_raw.jsonl"), columns=names)
    rows, examples, tokenizer = made("demonstration", entry)
    assert len(examples) == 200
    assert tokenizer.decode(rows[0].prompt).startswith("Weng earns $12 an hour")
    assert tokenizer.decode(rows[0].answers[0].tokens).endswith("#### 10" + tokenizer.eos_token)


@real
def test_the_real_sharegpt_pairs_are_read() -> None:
    path = str(FORMATS / "sharegpt_dpo_raw.json")
    for format, count in (("preference", 25), ("unpaired", 50)):
        rows, examples, tokenizer = made(format, DataEntry(path=path, convert="sharegpt"))
        assert len(examples) == len(rows) == count
        assert all(tokenizer.decode(row.prompt).endswith("<|assistant|>") for row in rows)
