"""From files to examples: every kind of file, mixing, the length policy, the cache, and errors with
path and line."""

import gzip
import importlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar

import attrs
import datasets
import numpy as np
import pytest
from attrs import frozen
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf.config.sections import BatchConfig, Config, DataConfig, DataEntry, TrainConfig
from rlhf.data.cache import once
from rlhf.data.example import Answer, Example
from rlhf.data.files import Source
from rlhf.data.tokenise import Examples, prepare
from rlhf.data.tokens import encode
from rlhf.errors import RLHFError
from rlhf.run.dataset import Dataset
from rlhf.trainer import Trainer

WORDS = ["<unk>", "</s>", *(f"w{n}" for n in range(40))]
ROWS = [{"prompt": f"w{n}", "completion": f"w{n} w{n + 1}"} for n in range(10)]


@frozen
class Section:
    """A trainer's section."""

    beta: float = 0.1


class Demonstrations(Trainer):
    row_format: ClassVar[str | None] = "demonstration"
    calls = 0

    def example(self, row: Any) -> Example:
        type(self).calls += 1
        return Example(row.prompt, row.answers)

    def setup(self, run: Any) -> None: ...
    def loss(self, batch: Any) -> Any: ...


class Raw(Demonstrations):
    """Takes raw rows: two answers with values of every kind."""

    row_format = None

    def example(self, row: Any) -> Example:
        number = row["number"]
        answers = [Answer([3, 4, 5], [False, True, True]), Answer([6])]
        label = [[float("nan"), 1.0, 0.5], [float("nan")]]
        values = {"margin": number / 2, "rank": [1.0, 2.0], "label": label}
        return Example([2] * (number + 1), answers, values, {"pixels": [[number]]})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    Demonstrations.calls = 0
    return tmp_path / "cache"


def word_tokenizer() -> PreTrainedTokenizerFast:
    model = models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def lines(path: Path, rows: list[Any] | None = None) -> str:
    """A JSON lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS))
    return str(path)


def made(
    *entries: str | DataEntry, trainer: type[Trainer] = Demonstrations, **settings: Any
) -> Examples:
    found = tuple(e if isinstance(e, DataEntry) else DataEntry(path=e) for e in entries)
    config = Config(
        data=DataConfig(train=found, **{"max_tokens": 64, **settings.pop("data", {})}),
        batch=BatchConfig(**settings.pop("batch", {})),
        train=TrainConfig(seed=settings.pop("seed", 0)),
    )
    tokenizer = word_tokenizer()
    tokenizer.chat_template = settings.pop("template", tokenizer.chat_template)
    section = settings.pop("section", Section())
    return prepare(config, trainer(section, tokenizer), tokenizer, which="train")


def ids(examples: Examples) -> list[tuple[list[int], list[int]]]:
    return [(list(e.prompt), list(e.answers[0].tokens)) for e in examples]


WANTED = [([n + 2], [n + 2, n + 3, 1]) for n in range(10)]


def test_every_kind_of_file_gives_the_same_examples(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=1))
    lines(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    rows.to_csv(tmp_path / "rows.csv")
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.save_to_disk(tmp_path / "folder")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "splits")
    (tmp_path / "plain").mkdir()
    rows.to_parquet(tmp_path / "plain" / "rows.parquet")
    arrow = next((tmp_path / "folder").glob("*.arrow"))
    names = [
        "rows.json",
        "rows.jsonl",
        "rows.jsonl.gz",
        "rows.csv",
        "rows.parquet",
        "folder",
        "splits",
        "plain",
    ]
    for path in [*(tmp_path / name for name in names), arrow]:
        examples = made(str(path))
        assert ids(examples) == WANTED, path
        assert examples.lengths.tolist() == [4] * 10
        assert examples.counts["tokens"].tolist() == [3] * 10


def test_cells_of_csv_are_text_but_for_labels_and_margins(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(
        "prompt,completion,label,margin\n1,None,True,0.5\n2,NA,0,\nq,007,false,2\n,nan,maybe,1e3\n"
    )
    for place in (path, path.with_suffix(".csv.gz")):
        if place != path:
            place.write_bytes(gzip.compress(path.read_bytes()))
        source = Source(DataEntry(path=str(place)), "train", "unpaired")
        rows = source.read(tmp_path)
        assert [dict(source.row(row, 0).columns) for row in rows] == [
            {"prompt": "1", "completion": "None", "label": True, "margin": 0.5},
            {"prompt": "2", "completion": "NA", "label": 0},
            {"prompt": "q", "completion": "007", "label": False, "margin": 2},
            {"completion": "nan", "label": "maybe", "margin": 1000.0},
        ]


def test_the_demo_gives_rows_of_the_trainers_format() -> None:
    examples = made(DataEntry(path="demo:equations", limit=7), data={"max_tokens": 4096})
    assert len(examples) == 7
    assert examples.name(3) == "demo:equations row 3"


def test_trees_values_and_counts_come_back_as_they_went_in(tmp_path: Path) -> None:
    examples = made(lines(tmp_path / "rows.jsonl", [{"number": n} for n in range(3)]), trainer=Raw)
    tree = examples[2]
    assert list(tree.prompt) == [2, 2, 2]
    assert [list(a.tokens) for a in tree.answers] == [[3, 4, 5], [6]]
    assert [np.asarray(a.trained).tolist() for a in tree.answers] == [[False, True, True], [True]]
    assert tree.values["margin"] == 1.0
    assert list(tree.values["rank"]) == [1.0, 2.0]
    assert [np.nan_to_num(row, nan=-1).tolist() for row in tree.values["label"]] == [
        [-1, 1, 0.5],
        [-1],
    ]
    assert tree.inputs == {"pixels": [[2]]}
    assert examples.value_kinds == {"label": "token", "margin": "example", "rank": "answer"}
    assert {name: count.tolist() for name, count in examples.counts.items()} == {
        "examples": [1, 1, 1], "answers": [2, 2, 2], "tokens": [3, 3, 3], "labels": [2, 2, 2],
    }  # fmt: skip
    assert examples.lengths.tolist() == [5, 6, 7]
    assert examples.longest_path.tolist() == [4, 5, 6]
    again = pickle.loads(pickle.dumps(examples))
    assert list(again[1].prompt) == [2, 2]


def test_several_processes_give_the_same_rows_in_the_same_order(tmp_path: Path) -> None:
    rows = [{"text": f"w{n % 40} w{n % 7}"} for n in range(4100)]
    path = lines(tmp_path / "rows.jsonl", rows)
    examples = made(path, data={"processes": 2})
    single = made(path, data={"processes": 1}, section=Section(beta=0.2))
    assert [list(e.answers[0].tokens) for e in examples] == [
        list(e.answers[0].tokens) for e in single
    ]
    assert examples.row_numbers.tolist() == list(range(4100))


def test_an_error_in_a_process_reads_like_any_other(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": "w1"} for _ in range(4100)]
    rows[4000] = {"nothing": 1}
    path = lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(RLHFError) as caught:
        made(path, data={"processes": 2})
    assert str(caught.value) == (
        f"{path} line 4001: a row needs `messages`, `text`, or `prompt` and `completion`, "
        "but this one has `nothing`; rename columns with `columns` in data"
    )


def test_columns_are_renamed_and_limits_are_kept(tmp_path: Path) -> None:
    rows = [{"question": row["prompt"], "answer": row["completion"]} for row in ROWS]
    path = lines(tmp_path / "rows.jsonl", rows)
    names = {"prompt": "question", "completion": "answer"}
    assert ids(made(DataEntry(path=path, columns=names, limit=4))) == WANTED[:4]
    with pytest.raises(RLHFError) as caught:
        made(DataEntry(path=path, columns={"prompt": "query"}))
    assert str(caught.value) == (
        f"{path} line 1: data.train maps `prompt` to column `query`, which does not exist; "
        "columns: question, answer"
    )


def test_a_weight_below_one_draws_a_share_by_the_seed(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl")
    entry = DataEntry(path=path, weight=0.3)
    first, second, other = made(entry), made(entry), made(entry, seed=5)
    assert len(first) == 3
    assert first.row_numbers.tolist() == second.row_numbers.tolist()
    assert first.row_numbers.tolist() != other.row_numbers.tolist()


def test_a_weight_above_one_takes_rows_again_and_sources_are_mixed(tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", ROWS[:4])
    two = lines(tmp_path / "two.jsonl", ROWS[4:])
    examples = made(DataEntry(path=one, weight=2.5), two)
    assert len(examples) == 10 + 6
    assert [prompt[0] for prompt, _ in ids(examples)][:8] == [2, 3, 4, 5] * 2
    assert examples.name(0) == f"{one} line 1"
    assert examples.name(15) == f"{two} line 6"
    assert examples.report.rows == 10


def test_tokens_beyond_a_vocabulary_are_found_with_their_row(tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", ROWS[:4])
    two = lines(tmp_path / "two.jsonl", ROWS[4:])
    examples = made(DataEntry(path=one, weight=2.5), two)
    # Row n is prompt n + 2, answer n + 2, n + 3, end.
    assert examples.first_beyond(13) is None
    assert examples.first_beyond(12) == (f"{two} line 6", 12)
    assert examples.first_beyond(5) == (f"{one} line 3", 5)
    assert examples.first_beyond(4) == (f"{one} line 2", 4)


def long_rows(path: Path) -> str:
    long = " ".join(["w1"] * 20)
    rows = [ROWS[0], {"prompt": "w0", "completion": long}, {"prompt": long, "completion": "w0"}]
    return lines(path, rows)


def test_long_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    path = long_rows(tmp_path / "rows.jsonl")
    examples = made(path, data={"max_tokens": 10})
    assert len(examples) == 1
    assert str(examples.report) == (
        "3 rows; 2 too long (dropped), 66.7 %; 1 examples of 4 tokens; 3 trained on, 75.0 %"
    )
    assert examples.report.lost == {"too_long": (f"{path} line 2", f"{path} line 3")}


def test_long_rows_are_cut_at_the_end_without_an_eos_over_the_last_token(tmp_path: Path) -> None:
    path = long_rows(tmp_path / "rows.jsonl")
    examples = made(path, data={"max_tokens": 10, "too_long": "cut"})
    assert ids(examples)[1] == ([2], [3] * 9)
    assert (examples.report.cut, examples.report.empty) == (1, 1)
    assert examples.longest_path.max() == 10


def test_a_tree_of_which_an_answer_has_lost_what_was_trained_is_dropped(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", [{"number": 0}])
    examples = made(path, trainer=Raw, data={"max_tokens": 3, "too_long": "cut"})
    assert [list(answer.tokens) for answer in examples[0].answers] == [[3, 4], [6]]
    with pytest.raises(RLHFError, match="1 with nothing to train on"):
        made(path, trainer=Raw, data={"max_tokens": 2, "too_long": "cut"})


def test_an_array_may_begin_after_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b"\xef\xbb\xbf\n \r\n" + b'[{"prompt": "a", "completion": "b"}]')
    (example,) = made(str(path))
    assert len(example.answers) == 1


def test_a_long_row_can_be_an_error(tmp_path: Path) -> None:
    path = long_rows(tmp_path / "rows.jsonl")
    with pytest.raises(RLHFError) as caught:
        made(path, data={"max_tokens": 10, "too_long": "error"})
    assert str(caught.value) == (
        f"{path} line 2: the row has 22 tokens, more than data.max_tokens 10; "
        "raise it or set data.too_long to drop or cut"
    )


def test_data_without_anything_to_train_on_names_rows(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", [{"text": ""}, {"text": " ".join(["w1"] * 99)}])
    with pytest.raises(RLHFError) as caught:
        made(path)
    assert str(caught.value) == (
        "data.train: no trainable rows left of 2: 1 longer than data.max_tokens 64 "
        f"({path} line 2), 1 with nothing to train on ({path} line 1)"
    )


def test_an_example_over_the_budget_names_the_least_sufficient_one(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", [*ROWS, {"text": "w1 w2 w3 w4 w5 w6 w7"}])
    with pytest.raises(RLHFError) as caught:
        made(path, batch={"tokens": 6})
    assert str(caught.value) == (
        f"{path} line 11: the example has 8 tokens, more than batch.tokens 6; "
        "set batch.tokens to at least 8 or lower data.max_tokens"
    )


BAD_FILES = [
    (
        "rows.jsonl",
        b'{"text": "w1"}\n{"text" "w2"}\n',
        "{} line 2: not valid JSON: Expecting ':' delimiter: line 1 column 9 (char 8)",
    ),
    (
        "rows.jsonl",
        b'["w1", "w2"]\n3\n',
        "{}: not valid JSON: Extra data: line 2 column 1 (char 13)",
    ),
    ("rows.jsonl", b'{"text": "w1"}\n17\n', "{} line 2: a row must be a JSON object, not 17"),
    (
        "rows.jsonl",
        b'{"text": "w1"}\n\xff\xfe\n',
        "{} line 2: not UTF-8: 'utf-8' codec can't decode byte 0xff in position 0: "
        "invalid start byte",
    ),
    ("rows.jsonl.gz", b"no gzip", "{} line 1: cannot be read: Not a gzipped file (b'no')"),
    (
        "rows.txt",
        b"w1\n",
        "data.train: unknown file type {}; use one of "
        ".jsonl, .jsonl.gz, .json, .json.gz, .ndjson, .csv, .csv.gz, .parquet, .arrow",
    ),
    ("rows.jsonl", b"", "data.train: no rows in {}"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_a_bad_file_is_named_with_its_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(RLHFError) as caught:
        made(str(path))
    assert str(caught.value) == message.format(path)


def test_a_missing_file_or_split_is_named(tmp_path: Path) -> None:
    path = tmp_path / "absent.jsonl"
    with pytest.raises(RLHFError) as caught:
        made(str(path))
    assert str(caught.value) == f"data.train: no such file or folder: {path}"
    rows = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    rows.save_to_disk(tmp_path / "splits")
    with pytest.raises(RLHFError) as caught:
        made(DataEntry(path=str(tmp_path / "splits"), split="dev"))
    assert (
        str(caught.value) == f"data.train: {tmp_path}/splits has no split 'dev'; available: train"
    )


def test_nested_mappings_keep_their_own_keys(tmp_path: Path) -> None:
    rows = [{"number": n, "tools": [{"properties": {f"key{n}": {"type": "x"}}}]} for n in range(2)]
    seen = []

    class Looking(Raw):
        def example(self, row: Any) -> Example:
            seen.append(row["tools"])
            return super().example(row)

    made(lines(tmp_path / "rows.jsonl", rows), trainer=Looking)
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    made(str(tmp_path / "rows.parquet"), trainer=Looking)
    assert seen == [row["tools"] for row in rows] * 2


def test_rows_are_tokenised_once_and_again_only_when_something_has_changed(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl")
    made(path)
    made(path)
    moved = lines(tmp_path / "moved.jsonl")
    made(moved, batch={"tokens": 100})
    assert Demonstrations.calls == 10
    made(path, section=Section(beta=0.2))
    made(path, data={"max_tokens": 63})
    assert Demonstrations.calls == 30
    lines(tmp_path / "rows.jsonl", ROWS[:5])
    made(path)
    assert Demonstrations.calls == 35
    made(path, template="{{ messages }}")
    made(path, template="{{ messages }}")
    assert Demonstrations.calls == 40


ROW_READER = """
from rows_of_mine.helper import tokens
from rlhf.data.example import Answer, Example
from rlhf.trainer import Trainer

class Mine(Trainer):
    def example(self, row):
        return Example([2], [Answer(tokens())])
    def setup(self, run): ...
    def loss(self, batch): ...
"""


def test_rows_are_tokenised_again_when_another_module_of_the_package_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path / "rows.jsonl")
    lengths = []
    for version, helper in enumerate(["[3, 4]", "[3, 4]", "[3, 4, 5]"]):
        folder = tmp_path / str(version) / "rows_of_mine"
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "trainer.py").write_text(ROW_READER)
        (folder / "helper.py").write_text(f"def tokens():\n    return {helper}\n")
        for name in [name for name in sys.modules if name.startswith("rows_of_mine")]:
            del sys.modules[name]
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder.parent)
            trainer = importlib.import_module("rows_of_mine.trainer").Mine
            lengths.append(made(path, trainer=trainer).lengths.tolist())
    assert lengths == [[3] * 10, [3] * 10, [4] * 10]
    entries = (tmp_path / "cache" / "examples").iterdir()
    assert len([entry for entry in entries if entry.is_dir()]) == 2


def test_the_cache_holds_no_pickles(tmp_path: Path, cache: Path) -> None:
    made(lines(tmp_path / "rows.jsonl"))
    files = {file.name for file in cache.rglob("*") if file.is_file() and file.suffix != ".lock"}
    assert files == {"examples.arrow", "report.json"}


def test_a_trainer_that_gives_a_wrong_tree_is_named_with_the_row(tmp_path: Path) -> None:
    class Wrong(Raw):
        def example(self, row: Any) -> Example:
            return attrs.evolve(super().example(row), values={"rank": [1.0]})

    path = lines(tmp_path / "rows.jsonl", [{"number": 1}])
    with pytest.raises(RLHFError) as caught:
        made(path, trainer=Wrong)
    assert str(caught.value) == (
        f"{path} line 1: Wrong.example() returned 1 of values 'rank' for 2 answers"
    )


def test_a_trainer_that_returns_no_example_is_named_with_the_row(tmp_path: Path) -> None:
    class Wrong(Raw):
        def example(self, row: Any) -> Any:
            return None

    path = lines(tmp_path / "rows.jsonl", [{"number": 1}])
    with pytest.raises(RLHFError) as caught:
        made(path, trainer=Wrong)
    assert str(caught.value) == (
        f"{path} line 1: Wrong.example() returned NoneType instead of an Example"
    )


def test_the_row_on_which_a_trainer_raises_is_named(tmp_path: Path) -> None:
    class Picky(Raw):
        def example(self, row: Any) -> Any:
            if row["number"] == 1:
                raise RLHFError("`number` is 1")
            return row["question"]

    with pytest.raises(RLHFError) as caught:
        made(lines(tmp_path / "one.jsonl", [{"number": 1}]), trainer=Picky)
    assert str(caught.value) == f"{tmp_path}/one.jsonl line 1: `number` is 1"
    with pytest.raises(KeyError) as missing:
        made(lines(tmp_path / "two.jsonl", [{"number": 2}]), trainer=Picky)
    assert missing.value.__notes__ == [f"the row is {tmp_path}/two.jsonl line 1"]


class Questions(Raw):
    """Encodes raw rows as core encodes its own formats."""

    def example(self, row: Any) -> Example:
        encoded = encode(self.tokenizer, row["question"], *row["replies"], tools=row.get("tools"))
        return Example(encoded.prompt, encoded.answers)


def test_a_trainer_with_rows_of_its_own_encodes_them_as_core_does(tmp_path: Path) -> None:
    template = (
        "{% if tools %}{{ 'w39 ' }}{% endif %}{% for m in messages %}{{ m.content + ' ' }}"
        "{% if m.role == 'assistant' %}{{ '</s> ' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'w38 ' }}{% endif %}"
    )
    talk = [{"role": "user", "content": "w1"}]
    said = [{"role": "assistant", "content": "w3"}]
    pairs = [
        {"prompt": "w1 w2", "chosen": "w3", "rejected": "w4 w5"},
        {"prompt": talk, "chosen": said, "rejected": "w4", "tools": [{"name": "add"}]},
        {"prompt": "w1", "chosen": "w3 " * 9, "rejected": "w4"},
    ]
    questions = [
        {"question": row["prompt"], "replies": [row["chosen"], row["rejected"]]}
        | ({"tools": row["tools"]} if "tools" in row else {})
        for row in pairs
    ]

    class Pairs(Demonstrations):
        row_format = "preference"

    settings: dict[str, Any] = {"template": template, "data": {"max_tokens": 9, "too_long": "cut"}}
    core = made(lines(tmp_path / "pairs.jsonl", pairs), trainer=Pairs, **settings)
    mine = made(lines(tmp_path / "mine.jsonl", questions), trainer=Questions, **settings)
    assert [tree_of(example) for example in mine] == [tree_of(example) for example in core]
    assert (mine.report.cut, core.report.cut) == (1, 1)


def tree_of(example: Example) -> tuple[list[int], list[tuple[list[int], Any]]]:
    answers = [
        (list(a.tokens), None if a.trained is None else list(a.trained)) for a in example.answers
    ]
    return list(example.prompt), answers


def test_what_cannot_be_encoded_is_named_with_its_row(tmp_path: Path) -> None:
    for replies, message in [
        ([], "a row needs at least one answer"),
        ([3], "`answers[0]` must be text or a list of messages, not int"),
        (
            [[{"role": "assistant", "content": "w1"}]],
            "this is a conversation, but the tokenizer has no chat template; "
            "set data.chat_template to a file or to chatml",
        ),
    ]:
        path = lines(tmp_path / "rows.jsonl", [{"question": "w0", "replies": replies}])
        with pytest.raises(RLHFError) as caught:
            made(path, trainer=Questions)
        assert str(caught.value) == f"{path} line 1: {message}"


def test_computed_values_belong_to_new_examples(tmp_path: Path) -> None:
    examples = made(lines(tmp_path / "rows.jsonl", ROWS[:2]))
    columns = [[[[0.5, 1.5, 2.5]], [[3.5, 4.5, 5.5]]]]
    more = examples.with_values("score", columns)
    assert more.value_kinds == {"score": "token"}
    assert examples.value_kinds == {}
    assert examples[1].values == {}
    for complete in (more, pickle.loads(pickle.dumps(more))):
        assert complete[1].values == {"score": [[3.5, 4.5, 5.5]]}


def test_a_value_per_example_is_read_whatever_values_precede_it(tmp_path: Path) -> None:
    class Named(Raw):
        def example(self, row: Any) -> Example:
            example = super().example(row)
            return attrs.evolve(example, values={**example.values, "weight": row["number"] * 3.0})

    path = lines(tmp_path / "rows.jsonl", [{"number": n} for n in range(3)])
    examples = made(path, trainer=Named)
    assert examples.value("margin").tolist() == [0.0, 0.5, 1.0]
    assert examples.value("weight").tolist() == [0.0, 3.0, 6.0]


def test_a_warning_says_what_to_do_if_many_rows_are_lost(tmp_path: Path) -> None:
    long = {"prompt": "w0", "completion": "w1 " * 20}
    few = made(lines(tmp_path / "few.jsonl", [*ROWS, long]), data={"max_tokens": 10})
    assert few.report.warning("train") is None
    path = lines(tmp_path / "many.jsonl", [*ROWS, long, long, {"text": ""}])
    dropped = made(path, data={"max_tokens": 10}).report
    assert dropped.warning("train") == (
        "data.train: 23.1 % of the rows are dropped or cut; raise data.max_tokens for 2 rows that "
        "are too long, or set data.too_long to cut; check 1 rows with nothing to train on with "
        "`rlhf inspect`"
    )
    cut = made(path, data={"max_tokens": 10, "too_long": "cut"}).report
    assert cut.warning("eval") == (
        "data.eval: 23.1 % of the rows are dropped or cut; raise data.max_tokens for 2 rows that "
        "are too long; check 1 rows with nothing to train on with `rlhf inspect`"
    )


def test_the_first_lines_of_a_run_warn_of_lost_rows(tmp_path: Path) -> None:
    long = {"prompt": "w0", "completion": "w1 " * 20}
    train = made(lines(tmp_path / "train.jsonl"))
    held_out = made(lines(tmp_path / "eval.jsonl", [*ROWS, long, long]), data={"max_tokens": 10})
    trainer = Demonstrations(Section(), None)
    assert Dataset(trainer=trainer, train=train, eval=None).warnings() == []
    assert Dataset(trainer=trainer, train=train, eval=held_out).warnings() == [
        "warning    data.eval: 16.7 % of the rows are dropped or cut; raise data.max_tokens for 2 "
        "rows that are too long, or set data.too_long to cut"
    ]


def build_slowly(folder: Path, log: Path) -> None:
    def build(part: Path) -> None:
        with log.open("a") as file:
            file.write("built\n")
        (part / "done").write_text("x")

    once(folder, build)
    assert (folder / "done").exists()


def test_of_many_processes_one_writes_and_the_others_wait_for_the_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    folder, log = tmp_path / "entry", tmp_path / "log"
    workers = [context.Process(target=build_slowly, args=(folder, log)) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 6
    assert log.read_text() == "built\n"


def die_while_building(folder: Path) -> None:
    once(folder, lambda part: os.kill(os.getpid(), signal.SIGKILL))


def test_a_builder_that_dies_is_replaced(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    folder, log = tmp_path / "entry", tmp_path / "log"
    first = context.Process(target=die_while_building, args=(folder,))
    first.start()
    first.join()
    assert first.exitcode == -signal.SIGKILL
    assert not folder.exists()
    build_slowly(folder, log)
    assert log.read_text() == "built\n"
