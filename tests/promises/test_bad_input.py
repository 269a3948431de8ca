"""What a user gets wrong is one line that says what, where and what to do, through the real
command."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

import sft_runs
from rlhf.commands.main import main
from sft_runs import Inputs

NEEDS = "a row needs `messages`, `text`, or `prompt` and `completion`, but this one has"
TALK = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]'


def error_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that ends with 2, without `error: `."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert out == ""
    return err.removeprefix("error: ").rstrip("\n")


ROWS = {
    "empty.jsonl": (b"", "data.train: no rows in {path}"),
    "blank.jsonl": (b"\n \n", "data.train: no rows in {path}"),
    "array.json": (b"[]", "data.train: no rows in {path}"),
    "number.json": (b"3\n", "{path} line 1: a row must be a JSON object, not 3"),
    "foreign.jsonl": (
        b'{"text": "a"}\n{"foo": 1}\n',
        "{path} line 2: " + NEEDS + " `foo`; rename columns with `columns` in data",
    ),
    "null.jsonl": (
        b'{"text": null}\n',
        "{path} line 1: " + NEEDS + " nothing; rename columns with `columns` in data",
    ),
    "latin.jsonl": (
        b'{"text": "\xe9"}\n',
        "{path} line 1: not UTF-8: 'utf-8' codec can't decode byte 0xe9 in position 10: invalid "
        "continuation byte",
    ),
    "torn.jsonl": (
        b'{"text": "a"}\n{"text": "b',
        "{path} line 2: not valid JSON: Unterminated string starting at: line 1 column 10 (char 9)",
    ),
    "no-archive.jsonl.gz": (
        b'{"text": "a"}\n',
        "{path} line 1: cannot be read: Not a gzipped file (b'{{\"')",
    ),
    "torn.jsonl.gz": (
        gzip.compress(b'{"text": "a"}\n' * 9, mtime=0)[:-9],
        "{path} line 10: cannot be read: Compressed file ended before the end-of-stream marker was "
        "reached",
    ),
    "deep.jsonl": (
        b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        "{path} line 1: not valid JSON: maximum recursion depth exceeded while decoding a JSON "
        "array from a unicode string",
    ),
    "half.jsonl": (
        b'{"text": "a \\ud800 b"}\n',
        "{path} line 1: '\\ud800' is half of a surrogate pair; write both halves",
    ),
    "number.jsonl": (b'{"text": 5}\n', "{path} line 1: `text` must be text, not int"),
    "completion.jsonl": (
        b'{"prompt": "a", "completion": 3}\n',
        "{path} line 1: `completion` must be text or a list of messages, not int",
    ),
    "messages.jsonl": (
        b'{"messages": "hello"}\n',
        "{path} line 1: `messages` must be a list of messages, not text",
    ),
    "role.jsonl": (
        b'{"messages": [{"role": 5, "content": "x"}]}\n',
        '{path} line 1: message 0 of `messages` has no `role`: {{"role": 5, "content": "x"}}',
    ),
    "content.jsonl": (
        b'{"messages": [{"role": "user", "content": {"a": 1}}]}\n',
        "{path} line 1: `content` of message 0 of `messages` must be text or a list of parts, not "
        "a mapping",
    ),
    "user.jsonl": (
        b'{"messages": [{"role": "user", "content": "x"}]}\n',
        "data.train: no trainable rows left of 1: 1 with nothing to train on ({path} line 1)",
    ),
    "tools.jsonl": (
        f'{TALK}, "tools": "{{"}}\n'.encode(),
        "{path} line 1: `tools` is not valid JSON",
    ),
    "tool.jsonl": (
        f'{TALK}, "tools": {{}}}}\n'.encode().replace(b'"tools": {}', b'"tools": {"a": 1}'),
        "{path} line 1: `tools` must be a list of JSON schemas, not a mapping",
    ),
    "keywords.jsonl": (
        f'{TALK}, "chat_template_kwargs": "x"}}\n'.encode(),
        "{path} line 1: `chat_template_kwargs` must be a mapping, not text",
    ),
    "foreign.csv": (
        b"a,b\n1,2\n",
        "{path} row 0: " + NEEDS + " `a`, `b`; rename columns with `columns` in data",
    ),
    "empty.csv": (b"", "data.train: no rows in {path}"),
    "header.csv": (b"prompt,completion\n", "data.train: no rows in {path}"),
    "wide.csv": (
        b"text\nHello\nHello, you\n",
        "data.train: cannot read {path}: line 3 has 2 cells for 1 column; put quotes around cells "
        "with commas",
    ),
    "torn.csv": (
        b'text\n"unclosed\nx,y,z\n',
        "data.train: cannot read {path}: line 2 has a quote that is not closed",
    ),
    "torn.parquet": (
        b"hello",
        "data.train: cannot read {path}: Parquet file size is 5 bytes, smaller than the minimum "
        "file footer (8 bytes)",
    ),
    "rows.txt": (
        b"hello",
        "data.train: unknown file type {path}; use one of .jsonl, .jsonl.gz, .json, .json.gz, "
        ".ndjson, .csv, .csv.gz, .parquet, .arrow",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_unreadable_files_and_invalid_rows_are_refused(
    name: str, inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, expected = ROWS[name]
    path = tmp_path / name
    path.write_bytes(content)
    words = [*sft_runs.words(inputs, tmp_path / "run"), "--data.train", str(path), "--nproc", "1"]
    assert error_line(["run", "sft", *words], capsys) == expected.format(path=path)
    assert not (tmp_path / "run").exists()


TEMPLATES = {
    "refuses": ("{{ raise_exception('not for me') }}", "not for me"),
    "breaks": ("{% for %}", "Expected an expression, got 'end of statement block'"),
    "misses": ("{{ messages[0].nope.more }}", "'dict object' has no attribute 'nope'"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_fails_is_an_error_with_the_row(
    name: str, inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, reason = TEMPLATES[name]
    (tmp_path / "template").write_text(text)
    words = [*sft_runs.words(inputs, tmp_path / "run"), "--data.chat_template"]
    assert error_line(["run", "sft", *words, str(tmp_path / "template")], capsys) == (
        f"{inputs.train} line 1: the chat template refuses the conversation ({reason}); change the "
        "row or set data.chat_template"
    )


SETTINGS = {
    "--data.train '/gone.jsonl'": "data.train: no such file or folder: /gone.jsonl",
    "--data.train {path: TRAIN, split: test}": "data.train: TRAIN is a file; remove split",
    "--data.train {path: TRAIN, subset: en}": "data.train: TRAIN is a file; remove subset",
    "--model.revision main": "model.revision has no effect on a local folder; remove it",
    "--model demo:base --model.revision main": (
        "model.revision has no effect on the embedded model demo:base; remove it"
    ),
    "--train.seed 9223372036854775808": (
        "train.seed: must be < 9223372036854775808: 9223372036854775808"
    ),
    "--batch.tokens 8": (
        "TRAIN line 7: the example has 63 tokens, more than batch.tokens 8; set batch.tokens to at "
        "least 63 or lower data.max_tokens"
    ),
    "--data.max_tokens 60 --data.too_long error": (
        "TRAIN line 7: the row has 63 tokens, more than data.max_tokens 60; raise it or set "
        "data.too_long to drop or cut"
    ),
    "--deepspeed.timeout 1e300": "deepspeed.timeout: must be <= 1000000: 1e+300",
    "--optim.lr= ": "optim.lr: expected a number, got null",
    "--optim.lr -1": "optim.lr: must be > 0: -1.0",
    "--checkpoint.best eval/nope": (
        "checkpoint.best: eval/nope needs a direction; write +eval/nope or -eval/nope "
        "(rise or fall)"
    ),
    "--backend nope": (
        "backend 'nope' is not installed; available: deepspeed (rlhf-plugin-deepspeed 0.1.0)"
    ),
}


@pytest.mark.parametrize("given", SETTINGS)
def test_invalid_settings_are_refused(
    given: str, inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, *rest = given.replace("TRAIN", str(inputs.train)).split(" ", 1)
    more = [head, *rest] if "{" in given else given.split()
    words = ["run", "sft", *sft_runs.words(inputs, tmp_path / "run"), *more]
    assert error_line(words, capsys) == SETTINGS[given].replace("TRAIN", str(inputs.train))
    assert not (tmp_path / "run").exists()


def test_tokens_beyond_the_vocabulary_are_an_error_with_the_row(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(inputs.model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 20}))
    words = [*sft_runs.words(inputs, tmp_path / "run"), "--model", str(folder)]
    line = error_line(["run", "sft", *words, "--model.init", "random"], capsys)
    start = f"{inputs.train} line 1: {folder} has embeddings for 20 tokens but none for '"
    assert line.startswith(start)
    assert line.endswith(
        "); set model.tokenizer to the tokenizer of this model, or add embeddings for all of its "
        "tokens to the model"
    )


def test_nproc_is_refused_under_a_launcher(
    inputs: Inputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["run", "sft", *sft_runs.words(inputs, tmp_path / "run")]
    monkeypatch.setenv("RANK", "0")
    assert error_line([*words, "--nproc", "2"], capsys) == (
        "--nproc 2 has no effect under a launcher, which starts the ranks; remove it"
    )
    for name, value in (("WORLD_SIZE", "x"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert error_line(words, capsys) == "the launcher set WORLD_SIZE to 'x', which is not a number"


def test_a_cache_that_cannot_be_written_is_an_error(
    inputs: Inputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "file"))
    assert error_line(["run", "sft", *sft_runs.words(inputs, tmp_path / "run")], capsys) == (
        f"cannot write to {tmp_path}/file/examples (Not a directory); choose another location"
    )


def test_a_run_that_cannot_start_leaves_the_run_that_it_would_overwrite(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = ["run", "sft", *sft_runs.words(inputs, folder, "--train.steps", "1", "--nproc", "1")]
    assert main(words) == 0

    def content() -> dict[str, bytes]:
        files = (path for path in folder.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in files}

    before = content()
    capsys.readouterr()
    # Only the model itself shows that it has no router.
    assert main([*words, "--overwrite", "--model.router_loss", "0.1"]) == 2
    assert "model.router_loss has no effect" in capsys.readouterr().err
    after = content()
    places = str(folder / "ranks")
    assert {name: after[name] for name in after if not name.startswith(places)} == before
    assert main([*words, "--overwrite", "--train.seed", "1"]) == 0
    assert content()[str(folder / "config.yaml")] != before[str(folder / "config.yaml")]
