"""`rlhf report` and `rlhf runs` read run folders, of any state, and write one page."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.cli import main
from rlhf_tools.chart import chart, smoothed, thinned, ticks
from rlhf_tools.recorded import read_newest, read_run
from rlhf_tools.template import number

GIB = 2**30
HOSTILE = "</pre><script>alert(1)</script>"
CONFIG: dict[str, Any] = {
    "model": {"path": "org/base"},
    "optim": {"lr": 1e-3},
    "data": {"train": [{"path": HOSTILE}], "eval": []},
    "output": "runs/a",
}
SUMMARY: dict[str, Any] = {
    "steps": 4, "ended": "done", "error": None, "seconds": {"set-up": 3.0, "forward": 65.0},
    "startup": {"imports": 12.5, "first step": 4.0},
    "devices": "2 x cuda", "data": {"train": {"rows": 1234, "examples": 1200, "tokens": 56789}},
    "memory": {"peak": 3 * GIB, "device": 8 * GIB, "parts": {"weights": 2 * GIB, "head": GIB}},
}  # fmt: skip
METRICS = [
    {"step": 0, "eval/loss": 4.0},
    {"step": 2, "loss": 3.0, "grad_norm": 1.0, "peak_memory_gib": 2.75, "epoch": 0.5},
    {"step": 4, "loss": 2.0, "grad_norm": float("nan"), "peak_memory_gib": 2.5, "epoch": 1.0},
    {"step": 4, "eval/loss": 2.5},
]


def write_run(
    folder: Path,
    *,
    config: Mapping[str, Any] = CONFIG,
    summary: Mapping[str, Any] = SUMMARY,
    metrics: Iterable[Mapping[str, Any]] = METRICS,
    samples: Iterable[Mapping[str, Any]] = (),
    more: Mapping[str, Any] = {},
) -> Path:
    """Write what a run leaves in its folder."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, **more}))
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "versions.json").write_text(json.dumps({"torch": "2.13.0", "trainer": "sft"}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(it) + "\n" for it in metrics))
    if samples:
        lines = [json.dumps(sample) + "\n" for sample in samples]
        (folder / "samples.jsonl").write_text("".join(lines))
    return folder


class Page(HTMLParser):
    """The elements of a page: their attributes by tag, the text below headings, what is open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: dict[str, list[dict[str, str | None]]] = {}
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.setdefault(tag, []).append(dict(attributes))
        if tag not in ("meta", "circle", "polyline", "line", "img"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.setdefault(tag, []).append(dict(attributes))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.text += f"{data.strip()} "


def report(*folders: Path) -> Page:
    """The page about these runs."""
    output = folders[0].parent / "report.html"
    assert main(["report", *map(str, folders), "--output", str(output)]) == 0
    return Page(output.read_text())


def test_the_page_shows_what_the_folder_holds(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "a"))
    for text in (
        "sft of org/base, 2 x cuda", "4 of 4", "held-out loss 2.5", "1 min 08 s", "1,234",
        "56,789",
        "estimate 3 GiB measured peak 2.75 GiB device 8 GiB", "2.13.0", "forward 1 min 05 s",
        "to the end of the first step imports 12.5 s first step 4 s",
        "-1.5",
    ):  # fmt: skip
        assert text in re.sub(r"\s+", " ", page.text), text
    names = [figure["data-name"] for figure in page.tags["figure"]]
    assert names == ["loss", "grad_norm", "peak_memory_gib", "epoch"]


def test_the_page_needs_no_network_and_runs_no_code_of_a_row(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "a"))
    assert len(page.tags["script"]) == 2
    assert page.text.count(HOSTILE) == 2
    for tags in page.tags.values():
        for attributes in tags:
            assert not {"src", "srcset", "data", "onerror"} & attributes.keys()
            assert (attributes.get("href") or "#").startswith("#")
    text = (tmp_path / "report.html").read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import|https?:|fetch\(", text)


def test_samples_are_shown_before_and_after_and_run_no_code(tmp_path: Path) -> None:
    rows = [
        {"step": step, "row": f"eval row {row}", "prompt": HOSTILE, "answers": [f"{step}-{row}"]}
        for step in (0, 50, 100)
        for row in range(2)
    ]
    page = report(write_run(tmp_path / "writes", samples=rows))
    for shown in ("eval row 0", "step 0", "0-0", "step 100", "100-1", HOSTILE):
        assert shown in page.text
    assert "50-0" not in page.text
    scored = {"step": 3, "row": "eval row 0", "prompt": "a", "answers": ["b", "c"]}
    pair = {**scored, "scores": [1.25, -0.5]}
    steps = {**scored, "row": "eval row 1", "scores": [[0.75, 0.875], []]}
    page = report(write_run(tmp_path / "scores", samples=[pair, steps]))
    words = page.text.split()
    assert [*words[words.index("1.25") :][:4]] == ["1.25", "b", "-0.5", "c"]
    assert [*words[words.index("0.75") :][:4]] == ["0.75", "0.875", "b", "c"]
    assert "Samples" not in report(write_run(tmp_path / "none")).text


def test_answers_in_the_order_of_rewards_are_shown_with_their_prompts(tmp_path: Path) -> None:
    rows = [
        {
            "step": step, "which": which, "row": f"eval row {step}-{which}",
            "prompt": f"{HOSTILE} at {step}", "answers": [f"{HOSTILE} {which} {step}"],
            "scores": [step + 0.5],
        }
        for step in (0, 50, 100)
        for which in ("highest reward 1", "lowest reward 1")
    ]  # fmt: skip
    page = report(write_run(tmp_path / "rewards", samples=rows))
    for which in ("highest reward 1", "lowest reward 1"):
        for step in (0, 100):
            shown = (
                f"step {step}, eval row {step}-{which} {HOSTILE} at {step} {step + 0.5} {HOSTILE}"
            )
            assert shown in re.sub(r"\s+", " ", page.text)
    assert "at 50" not in page.text


PICTURE = "data:image/jpeg;base64,/9j/AAAA"


def test_images_of_samples_are_shown_once_for_a_row(tmp_path: Path) -> None:
    sample = {"row": "eval row 0", "prompt": "a", "answers": ["b"], "images": [PICTURE, PICTURE]}
    write_run(tmp_path / "rows", samples=[{**sample, "step": step} for step in (0, 50, 100)])
    page = report(tmp_path / "rows")
    shown = {"src": PICTURE, "alt": "image 1"}
    assert page.tags["img"] == [shown, {**shown, "alt": "image 2"}]
    assert "img-src data:;" in (tmp_path / "report.html").read_text()
    # The rows with the highest reward may be others at each evaluation.
    ranked = [
        {**sample, "which": "highest reward 1", "step": step, "images": [f"{PICTURE}{end}"]}
        for step, end in ((0, ""), (50, "CCCC"), (100, "BBBB"))
    ]
    page = report(write_run(tmp_path / "ranked", samples=ranked))
    assert [image["src"] for image in page.tags["img"]] == [PICTURE, f"{PICTURE}BBBB"]


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a.jpg", "data:image/svg+xml;base64,AAAA", f'{PICTURE}"onerror="x',
        "", 3,
    ],
)  # fmt: skip
def test_a_page_shows_no_image_but_a_small_picture(tmp_path: Path, url: object) -> None:
    sample = {"step": 0, "row": "r", "prompt": "a", "answers": ["b"], "images": [url]}
    page = report(write_run(tmp_path / "a", samples=[sample]))
    assert "img" not in page.tags
    assert "left out, since it is damaged: 1 line of samples.jsonl" in page.text


def test_a_page_has_pictures_of_a_bounded_size(tmp_path: Path) -> None:
    large = PICTURE + "A" * 2**20
    rows = [
        {"step": 0, "row": f"r {n}", "prompt": "a", "answers": ["b"], "images": [large, PICTURE]}
        for n in range(5)
    ]
    page = report(write_run(tmp_path / "a", samples=rows))
    sizes = [len(str(image["src"])) for image in page.tags["img"]]
    assert sizes == [len(large), len(PICTURE)] * 3 + [len(PICTURE)] * 2
    assert "2 more small pictures of images are left out: those above take 4 MB." in page.text


def test_two_runs_share_charts_and_show_the_settings_that_differ(tmp_path: Path) -> None:
    other = {"optim": {"lr": 5e-4}, "output": "runs/b"}
    page = report(write_run(tmp_path / "a"), write_run(tmp_path / "b", more=other))
    text = re.sub(r"\s+", " ", page.text)
    assert "different settings a b optim.lr 0.001 0.0005 a data:" in text
    assert {line["data-run"] for line in page.tags["polyline"]} == {"0", "1"}


def test_runs_of_one_name_are_shown_by_their_paths(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / parent / "a") for parent in ("x", "y")]
    assert f" {folders[0]} " in report(*folders).text


@pytest.mark.parametrize(
    ("ended", "state"), [("patience", "done"), ("hours", "stopped"), (None, "failed")]
)
def test_a_run_has_the_state_in_which_it_ended(
    tmp_path: Path, ended: str | None, state: str
) -> None:
    folder = write_run(tmp_path / "a", summary=SUMMARY | {"ended": ended})
    assert read_newest(folder).state == state
    assert f" {state} " in report(folder).text


def test_folders_of_runs_that_failed_at_once_or_have_odd_lines_are_read(tmp_path: Path) -> None:
    early = tmp_path / "early"
    early.mkdir()
    (early / "summary.json").write_text('{"steps": 4, "ended": "failed", "error": "no weights"}')
    odd = write_run(tmp_path / "odd")
    with (odd / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": 5, "loss": "text", "flag": true}\n{"step": 6, "lo')
    old = write_run(tmp_path / "old")
    (old / "summary.json").unlink()
    (old / "model").mkdir()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name, text in (("config.yaml", "model: x\ndata: [y]"), ("summary.json", "[]")):
        (foreign / name).write_text(text)
    damaged = write_run(tmp_path / "damaged")
    (damaged / "config.yaml").write_bytes(b"model: {\xff")
    assert "no weights" in report(early, odd, old, foreign, damaged).text
    assert main(["runs", str(tmp_path)]) == 0
    assert read_run(odd).curves["loss"] == [(2, 3.0), (4, 2.0)]
    assert read_newest(old).state == "done"


SAMPLES = [
    {"step": step, "row": "r:1", "prompt": "a", "answers": ["b", "c"], "scores": [1.5, [0.5, 1.0]]}
    for step in (0, 4)
]
ODD: list[Any] = [
    None, "text", 3, -1.5, True, [], {}, [[1]], {"a": 1}, {"path": 3}, {"train": [5]}, 10**400,
    1e308, float("inf"), float("nan"),
]  # fmt: skip
"""Values of other types, of which each is put where the run wrote something else."""


def read_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The text of the page about a run, which `rlhf runs` lists too."""
    text = re.sub(r"\s+", " ", report(folder).text)
    for words in ([], ["--json"]):
        assert main(["runs", str(folder.parent), *words]) == 0
    capsys.readouterr()
    return text


@pytest.mark.parametrize("damage", ["half", "empty", "nul", "bytes", "list", "number", "deep"])
@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "versions.json", "metrics.jsonl"])
def test_a_page_names_the_damaged_file_that_it_leaves_out(
    tmp_path: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path / "a", samples=SAMPLES) / name
    content = file.read_bytes()
    contents = {
        "half": content[: len(content) // 2 + 3], "empty": b"", "nul": bytes(4096),
        "bytes": b"\xff\xfe" + content, "list": b"[1]\n", "number": b"3\n", "deep": b"[" * 99_999,
    }  # fmt: skip
    file.write_bytes(contents[damage])
    text = read_damaged(tmp_path / "a", capsys)
    left_out = name if file.suffix != ".jsonl" else f"1 line of {name}"
    shown = f"left out, since it is damaged: {left_out}"
    # Half of YAML is YAML here, and an empty file has no line that could be damaged.
    unnoticed = {("config.yaml", "half"), ("metrics.jsonl", "empty")}
    assert (shown in text) == ((name, damage) not in unnoticed)


def test_damaged_lines_are_left_out_and_the_others_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "a", samples=SAMPLES)
    lines = [
        b"[1]", b'{"loss": 9.0}', b'{"step": "3", "loss": 9.0}', b'{"step": 1e400}', b"\0\0\0",
        b'\0\0{"step": 5, "loss": 1.5}', b'{"step": 6, "loss": "text", "kl": 0.25}', b"",
        b'{"step": 7, "lo',
    ]  # fmt: skip
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\n".join(lines))
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"step": 4, "row": ["r"], "answers": 5}\n')
    run = read_run(folder)
    assert run.left_out == ["6 lines of metrics.jsonl", "1 line of samples.jsonl"]
    assert run.curves["loss"] == [(2, 3.0), (4, 2.0), (5, 1.5)]
    assert run.curves["kl"] == [(6, 0.25)]
    assert list(run.samples) == SAMPLES
    expected = "since it is damaged: 6 lines of metrics.jsonl, 1 line of samples.jsonl"
    assert expected in read_damaged(folder, capsys)


def test_values_of_other_types_end_no_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for odd in ODD:
        folder = write_run(tmp_path / "a", samples=SAMPLES, more={"model": odd, "data": odd})
        values = dict.fromkeys(SUMMARY, odd) | {"memory": {"peak": odd, "device": 1, "parts": odd}}
        (folder / "summary.json").write_text(json.dumps(values))
        (folder / "versions.json").write_text(json.dumps({"trainer": odd, "torch": odd}))
        (folder / "plan.json").write_text(json.dumps({"policy": odd}))
        for name, records in (("metrics.jsonl", METRICS), ("samples.jsonl", SAMPLES)):
            changed = [{**record, key: odd} for record in records for key in (*record, "unknown")]
            (folder / name).write_text("".join(json.dumps(record) + "\n" for record in changed))
        assert "left out, since it is damaged: " in read_damaged(folder, capsys), odd
        shutil.rmtree(folder)


def test_a_file_that_the_system_cannot_read_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "a")

    def refused(self: Path, *arguments: Any, **options: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))

    monkeypatch.setattr(Path, "open", refused)
    assert main(["report", str(folder)]) == 2
    message = f"error: cannot read {folder / 'metrics.jsonl'}: Input/output error\n"
    assert capsys.readouterr().err == message


def test_the_runs_of_a_folder_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "sft-1")
    (tmp_path / "notes").mkdir()
    assert main(["runs", str(tmp_path)]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "name",
        "trainer",
        "model",
        "step",
        "state",
        "loss",
        "evaluation",
        "age",
    ]
    assert row.split() == ["sft-1", "sft", "org/base", "4", "of", "4", "done", "2", "2.5", "0", "s"]
    assert main(["runs", str(tmp_path), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed.pop("age") < 60
    assert listed == {
        "name": "sft-1", "trainer": "sft", "model": "org/base", "step": 4, "steps": 4,
        "state": "done", "loss": 2.0, "evaluation": {"eval/loss": 2.5},
    }  # fmt: skip


def test_a_run_that_failed_before_its_first_step_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    early = tmp_path / "early"
    early.mkdir()
    (early / "summary.json").write_text('{"steps": 4, "ended": "failed", "devices": "1 x cpu"}')
    assert main(["runs", str(tmp_path)]) == 0
    _, row = capsys.readouterr().out.splitlines()
    assert re.split("  +", row) == [
        "early", "-", "-", "0 of 4", "failed at start", "-", "-", "0 s"
    ]  # fmt: skip
    assert main(["runs", str(tmp_path), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["trainer"], listed["model"]) == (None, None)
    assert "?" not in report(early).text
    (early / "summary.json").write_text('{"ended": "failed", "startup": {"imports": 2.0}}')
    assert main(["runs", str(tmp_path)]) == 0
    assert "  failed  " in capsys.readouterr().out


def test_a_run_of_the_future_has_no_age(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "sft-1")
    os.utime(run / "metrics.jsonl", (time.time() + 100, time.time() + 100))
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("  0 s\n")


def test_a_path_that_is_not_a_run_folder_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = tmp_path / "nothing"
    assert main(["report", str(nothing)]) == 2
    assert main(["runs", str(nothing)]) == 2
    assert main(["report", str(write_run(tmp_path / "a")), "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {nothing} is not a run folder: it has no config.yaml; pass RUN, as in runs/sft-1",
        f"error: {nothing} is not a folder; pass the folder that contains the runs",
        f"error: cannot write to {tmp_path} (Is a directory); choose another location",
    ]
    assert main(["runs", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path / 'a'}\n"


def test_a_long_run_is_thinned_to_its_extremes(tmp_path: Path) -> None:
    lines = ({"step": step, "loss": 1.0 + (step == 70_001)} for step in range(100_000))
    folder = write_run(tmp_path / "a", metrics=lines)
    report(folder)
    assert (tmp_path / "report.html").stat().st_size < 100_000
    assert (70_001, 2.0) in thinned(read_run(folder).curves["loss"])


def test_numbers_ticks_and_means_are_right() -> None:
    assert list(map(number, [0.5374371, 12345, 3.2e7, 0.00002, None, True, "x"])) == [
        "0.5374", "12,345", "32M", "2.00e-05", "-", "True", "x",
    ]  # fmt: skip
    assert ticks(0.3, 6.4, most=5) == [2.0, 4.0, 6.0]
    assert smoothed([(step, 3.0) for step in range(900)])[-1] == (899, pytest.approx(3.0))
    flat = chart("loss", [{"loss": [(5, 2.0)]}])
    assert flat.domain == (5, 6, 1.8, 2.2)


def test_reading_runs_imports_no_torch(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    code = (
        "import sys; from rlhf.cli import main; main(sys.argv[1:3]);"
        "main(['report', sys.argv[2] + '/a', '--output', sys.argv[2] + '/page.html']);"
        "print({'torch', 'transformers', 'numpy'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", code, "runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
