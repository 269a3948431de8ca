"""Runs with a teacher from disk and with new answers: the same on any ranks and stages, and to the
last bit after a resume."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import rlhf_demo
from rlhf.errors import RLHFError
from rlhf_devkit import column, layouts, read_config, shared, tiny, without_timings

Words = Callable[..., list[str]]
CACHED = ("--kd.cache_top", "5", "--kd.temperature", "2", "--kd.sft", "0.1")
ON_POLICY = ("--kd.on_policy", "0.5", "--kd.teacher_answers", "0.3", "--kd.max_new_tokens", "12")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Words:
    """The words of a tiny run into a folder of this name."""
    folder = tmp_path_factory.mktemp("teachers")
    student = tiny.make_model(folder / "student", ends_answers=True)
    teacher = tiny.make_model(folder / "teacher", seed=1, ends_answers=True)
    rows = rlhf_demo.rows("arithmetic", "train", "demonstration")
    train = tiny.write_rows(folder / "train.jsonl", rows[:10])
    held_out = tiny.write_rows(folder / "eval.jsonl", rows[10:13])

    def make(name: str, *more: str) -> list[str]:
        return [
            "--model", str(student), "--model.dtype", "fp32", "--kd.teacher", str(teacher),
            "--data.train", str(train), "--data.eval", str(held_out), "--data.workers", "0",
            "--batch.size", "4", "--batch.tokens", "128", "--optim.lr", "1e-2",
            "--optim.clip", "0.01", "--train.steps", "4", "--checkpoint.every", "null",
            "--output", str(folder / name), *more,
        ]  # fmt: skip

    return make


def same(one: tiny.Metrics, other: tiny.Metrics) -> None:
    assert column(one, "loss") == pytest.approx(column(other, "loss"), abs=1e-5)
    assert column(one, "grad_norm") == pytest.approx(column(other, "grad_norm"), rel=1e-3)
    assert one[-1]["eval/loss"] == pytest.approx(other[-1]["eval/loss"], abs=1e-5)


@pytest.mark.parametrize("settings", [CACHED, ON_POLICY])
@pytest.mark.parametrize("stage", [pytest.param("stage 0", marks=pytest.mark.matrix), "stage 3"])
def test_the_curve_on_two_ranks_is_that_of_plain_torch(
    settings: tuple[str, ...], stage: str, words: Words, tmp_path: Path
) -> None:
    name = f"{settings[0]} {stage}"
    plain = tiny.run("kd", words(f"{name} plain", *settings), str(tmp_path / "one"), True)
    given = words(name, *settings, *layouts()[stage])
    # A cache of its own: the teacher's distributions are computed by both ranks at this stage.
    same(shared(2).run(tiny.run, "kd", given, str(tmp_path / "two"))[0], plain)
    roles = json.loads((Path(given[given.index("--output") + 1]) / "plan.json").read_text())
    assert set(roles) == ({"policy"} if settings is CACHED else {"policy", "teacher"})


@pytest.mark.parametrize("settings", [CACHED, ON_POLICY])
def test_a_resumed_run_is_the_same_to_the_last_bit(
    settings: tuple[str, ...], words: Words, tmp_path: Path
) -> None:
    def run(name: str, *more: str) -> Any:
        given = words(f"{settings[0]} {name}", *settings, *layouts()["stage 3"], *more)
        return without_timings(shared(2).run(tiny.run, "kd", given, str(tmp_path))[0])

    straight = run("straight")
    run("halves", "--train.stop_at", "2")
    halves = run("halves", "--resume")
    assert [line for line in halves if "loss" in line] == [
        line for line in straight if "loss" in line
    ]
    assert halves[-1] == straight[-1]


def padded(folder: Path, size: int, *, tied: bool = True) -> Path:
    """Give a model's embedding and head more rows, with large values, which no token has."""
    model = LlamaForCausalLM.from_pretrained(folder)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    known = model.config.vocab_size
    model.resize_token_embeddings(size, mean_resizing=False)
    for part in {model.get_input_embeddings(), model.get_output_embeddings()}:
        torch.nn.init.normal_(part.weight.data[known:])
    model.save_pretrained(folder)
    return folder


SIZES = {"a larger teacher": {"teacher": 320}, "a larger student": {"student": 311}}


@pytest.mark.parametrize(
    "sizes", ["a larger teacher", pytest.param("a larger student", marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize(
    "settings",
    [("--kd.loss", "jsd", "--kd.sft", "0.2"), ("--kd.cache_top", "294"), ON_POLICY],
    ids=["running", "cached", "new answers"],
)
def test_padding_of_one_head_does_not_change_a_run(
    settings: tuple[str, ...], sizes: str, words: Words, tmp_path: Path
) -> None:
    paths = models(tmp_path, tied="--kd.sft" in settings)
    name = f"{sizes} {settings[0]}"
    plain = tiny.run("kd", words(f"{name} bare", *settings, *paths), str(tmp_path / "cache"), True)
    for role, size in SIZES[sizes].items():
        padded(tmp_path / role, size)
    given = words(name, *settings, *paths, "--train.samples", "1")
    same(tiny.run("kd", given, str(tmp_path / "cache"), True), plain)


def models(folder: Path, *, tied: bool = True) -> list[str]:
    """Write a student and a teacher, and return the words that name them."""
    for seed, name in enumerate(("student", "teacher")):
        made = tiny.make_model(folder / name, seed=seed, ends_answers=True)
        padded(made, LlamaConfig.from_pretrained(made).vocab_size, tied=tied)
    return ["--model", str(folder / "student"), "--kd.teacher", str(folder / "teacher")]


def test_a_padded_student_in_shards_keeps_the_rows_of_no_token(
    words: Words, tmp_path: Path
) -> None:
    paths = models(tmp_path)
    plain = tiny.run("kd", words("bare on one rank", *paths), str(tmp_path / "cache"), True)
    padded(tmp_path / "student", 311)
    before = load_file(tmp_path / "student/model.safetensors")["model.embed_tokens.weight"]
    given = words("padded on two ranks", *paths, *layouts()["stage 3"], "--deepspeed.frozen", "3")
    same(shared(2).run(tiny.run, "kd", given, str(tmp_path / "cache"))[0], plain)
    folder = Path(given[given.index("--output") + 1])
    after = load_file(folder / "model/model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(after[295:], before[295:])
    assert not torch.equal(after[:295], before[:295])


def test_the_first_lines_say_how_many_tokens_are_compared(
    words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = models(tmp_path)
    padded(tmp_path / "teacher", 320)
    tiny.run("kd", words("noted", *paths, "--train.stop_at", "1"), str(tmp_path / "cache"), True)
    assert (
        "\ntokens     the first 295, which policy and teacher both predict; their heads have "
        "different sizes\n"
    ) in capsys.readouterr().out


def test_all_tokens_except_one_on_disk_equal_the_full_teacher(words: Words, tmp_path: Path) -> None:
    whole = tiny.run("kd", words("whole"), str(tmp_path), True)
    cached = tiny.run("kd", words("all", "--kd.cache_top", "294"), str(tmp_path), True)
    same(cached, whole)


def test_the_teacher_is_computed_once_and_a_damaged_file_again(
    words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def note(name: str) -> str:
        capsys.readouterr()
        tiny.run("kd", words(name, *CACHED), str(tmp_path), True)
        (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("teacher "))
        return line.split(" in ")[0]

    assert note("first") == "teacher    its 5 most likely tokens: 13 examples computed"
    assert note("second") == "teacher    its 5 most likely tokens: found"
    file = next((tmp_path / "teacher").rglob("*.npy"))
    values = np.load(file)
    values[0] += 1
    np.save(file, values)
    assert note("third").endswith("examples computed")


def test_the_first_lines_name_student_and_teacher(
    words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words("named", "--model.init", "random", "--train.stop_at", "1")
    tiny.run("kd", given, str(tmp_path), True)
    printed = capsys.readouterr().out
    teacher = given[given.index("--kd.teacher") + 1]
    assert re.search(r"model .+: [\d,]+ parameters, fp32, random weights\n", printed)
    assert re.search(rf"teacher    {teacher}: [\d,]+ parameters, frozen\n", printed)


def test_more_tokens_than_there_are_cannot_be_kept(words: Words, tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as error:
        tiny.run("kd", words("many", "--kd.cache_top", "295"), str(tmp_path), True)
    assert str(error.value) == (
        "kd.cache_top 295 must be less than the 295 tokens of the vocabulary; lower it, or remove "
        "it to run the teacher alongside the policy"
    )


def test_a_missing_teacher_is_an_error_before_anything_is_read() -> None:
    with pytest.raises(RLHFError) as error:
        read_config("kd", overrides=["--model", "nowhere", "--data", "nothing.jsonl"])
    assert str(error.value) == ("kd.teacher is missing; pass --kd.teacher FOLDER_OR_HUB_NAME")
    assert read_config("kd", inputs=False).config.own.teacher == ""


def test_new_answers_may_end_with_a_table_of_positions(words: Words, tmp_path: Path) -> None:
    for name in ("student", "teacher"):
        folder = tiny.make_model(tmp_path / name)
        vocabulary = LlamaConfig.from_pretrained(folder).vocab_size
        sizes = GPT2Config(vocab_size=vocabulary, n_positions=80, n_embd=8, n_head=2, n_layer=1)
        GPT2LMHeadModel(sizes).save_pretrained(folder)
    models = ("--model", str(tmp_path / "student"), "--kd.teacher", str(tmp_path / "teacher"))
    # data.max_tokens is 4096.
    tiny.run("kd", words("table", *models, *ON_POLICY), str(tmp_path / "cache"), True)
    longer = words("longer", *models, "--kd.on_policy", "1", "--kd.max_new_tokens", "80")
    with pytest.raises(RLHFError, match="has 80 positions but rows of up to 1"):
        tiny.run("kd", longer, str(tmp_path / "cache"), True)
    mended = ("--data.max_tokens", "80", "--batch.tokens", "1024")
    metrics = tiny.run("kd", [*longer, *mended], str(tmp_path / "cache"), True)
    assert len(column(metrics, "loss")) == 4


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ((), "a local folder"),
        (("--kd.teacher", "demo:base"), "the embedded model demo:base"),
    ],
)
def test_a_revision_without_effect_is_refused(
    words: Words, more: tuple[str, ...], what: str
) -> None:
    with pytest.raises(RLHFError) as error:
        read_config("kd", overrides=words("revised", "--kd.teacher_revision", "v2", *more))
    assert str(error.value) == f"kd.teacher_revision has no effect on {what}; remove it"


def test_a_path_without_a_teacher_is_refused_before_the_data_is_read(words: Words) -> None:
    with pytest.raises(RLHFError) as error:
        read_config("kd", overrides=words("missing", "--kd.teacher", "./gone"))
    assert str(error.value) == (
        "kd.teacher ./gone does not exist; pass a model folder or a name on the hub"
    )


def test_the_error_of_a_missing_teacher_names_its_setting(words: Words, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    with pytest.raises(RLHFError, match=f"^kd.teacher {nothing} is neither a folder with a config"):
        tiny.run("kd", words("absent", "--kd.teacher", str(nothing)), str(tmp_path), True)


def test_the_revision_says_which_teacher_of_a_hub_it_is(words: Words, tmp_path: Path) -> None:
    """A hub's files as they lie on disk after a download: one name, two commits."""
    hub = tmp_path / "hub" / "models--someone--teacher"
    for seed, (branch, commit) in enumerate((("main", "a" * 40), ("old", "b" * 40)), start=2):
        tiny.make_model(hub / "snapshots" / commit, seed=seed)
        (hub / "refs").mkdir(exist_ok=True)
        (hub / "refs" / branch).write_text(commit)
    stop = ("--kd.cache_top", "5", "--train.stop_at", "1")
    old = ("--kd.teacher", "someone/teacher", "--kd.teacher_revision", "old")
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    env |= {"RLHF_CACHE": str(tmp_path / "cache"), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "rlhf", "run", "kd", *words("old of the hub", *stop, *old)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.search(r"run folder (.+)", done.stdout)
    assert found is not None
    lines = (Path(found[1]) / "metrics.jsonl").read_text().splitlines()
    loss = column([json.loads(line) for line in lines], "loss")
    folder = str(hub / "snapshots" / ("b" * 40))
    same_folder = words("old of the folder", *stop, "--kd.teacher", folder)
    assert loss == pytest.approx(column(tiny.run("kd", same_folder, str(tmp_path), True), "loss"))
