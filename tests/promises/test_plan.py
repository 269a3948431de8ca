"""`rlhf plan`: the table, JSON, hardware as an argument, and what it advises."""

import json
from pathlib import Path

import pytest
from fits import on_accelerator, small_run

from rlhf.commands.main import main
from rlhf.engine import GIB, gib
from rlhf.memory.choice import Choice, choose


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return small_run(tmp_path_factory.mktemp("plan"))


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    code = main(["plan", "sft", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_parts_of_a_layout_add_up_to_its_peak(words, capsys):
    code, report = planned(capsys, *words, "--gpus", "2", "--gpu-memory", "1")
    assert code == 0
    assert (report["gpus"], report["gpu_memory"]) == (2, GIB)
    assert [row["layout"] for row in report["layouts"]][:4] == [f"ZeRO {n}" for n in range(4)]
    for row in report["layouts"]:
        assert sum(row["parts"].values()) == row["peak"]
        assert bool(row["host"]) == ("CPU" in row["layout"])
    assert report["chosen"] == "ZeRO 0"
    assert report["reason"] == report["advice"] == ""
    assert not Path(words[words.index("--output") + 1]).exists()


def test_the_table_word_for_word(words, capsys):
    one = ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0")
    options = (*words, *one, "--gpus", "2", "--gpu-memory", "1")
    _, report = planned(capsys, *options)
    assert main(["plan", "sft", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        f"sft {words[1]}: 2 x 1.0 GiB, 8,192 tokens per micro-batch, recompute none"
    )
    assert lines[1] == "GiB per rank at the peak of a step"
    assert lines[3].split() == [
        "layout", "weights", "gradients", "masters", "optimizer", "other", "activations", "head",
        "peak", "host", "fits",
    ]  # fmt: skip
    assert [line[:43].rstrip() for line in lines[4:7]] == [
        "ZeRO 3",
        "ZeRO 3, optimizer on the CPU",
        "ZeRO 3, optimizer and parameters on the CPU",
    ]
    peak = gib(report["peak"])
    assert lines[8:] == [
        f"chosen     ZeRO 3: a step takes {peak} of 1.0 GiB",
        f"disk       {gib(report['checkpoint'])} GiB for each checkpoint",
    ]


def test_hardware_may_come_before_the_name(words, capsys):
    _, after = planned(capsys, *words, "--gpus", "4", "--gpu-memory", "0.5")
    assert main(["plan", "--gpus", "4", "--gpu-memory", "0.5", "--json", "sft", *words]) == 0
    assert json.loads(capsys.readouterr().out) == after


def test_the_first_layout_in_which_a_step_fits_is_chosen(words, capsys):
    tokens = ("--batch.tokens", "200", "--model.recompute", "none", "--gpus", "8")
    _, report = planned(capsys, *words, *tokens, "--gpu-memory", "1")
    peaks = {row["layout"]: row["peak"] for row in report["layouts"]}
    assert peaks["ZeRO 3"] < peaks["ZeRO 0"]
    memory = peaks["ZeRO 3"] / 0.95 / GIB
    code, report = planned(capsys, *words, *tokens, "--gpu-memory", f"{memory * 1.001}")
    fitting = [row["layout"] for row in report["layouts"] if row["fits"]]
    assert (code, report["chosen"]) == (0, fitting[0])
    begin = f"layout     {fitting[0]}: with {fitting[0]} a step takes "
    assert report["reason"].startswith(begin)


def test_the_plan_and_the_run_choose_alike(words, capsys):
    _, report = planned(capsys, *words, "--gpu-memory", "1")
    choice, _ = choose(on_accelerator(words, GIB), any_tokens=True)
    assert isinstance(choice, Choice)
    assert choice.recompute == "auto"
    assert (report["tokens"], report["recompute"]) == (choice.tokens, "none")


def test_a_configured_layout_that_does_not_fit_is_an_exit_code_with_what_fits(words, capsys):
    # No smaller number of tokens is possible.
    fixed = ("--batch.tokens", "136", "--model.recompute", "full", "--gpus", "8")
    _, report = planned(capsys, *words, *fixed, "--gpu-memory", "1")
    peaks = {row["layout"]: row["peak"] for row in report["layouts"]}
    memory = f"{peaks['ZeRO 3'] / 0.95 / GIB * 1.001}"
    options = (*words, *fixed, "--deepspeed.stage", "0", "--gpu-memory", memory)
    assert main(["plan", "sft", *options]) == 2
    *_, chosen, advice, _ = capsys.readouterr().out.splitlines()
    assert chosen == (
        f"chosen     ZeRO 0: a step takes {gib(peaks['ZeRO 0'])} of {gib(peaks['ZeRO 3'] / 0.95)} "
        "GiB, which probably will not fit"
    )
    assert peaks["ZeRO 1"] > peaks["ZeRO 3"]
    assert advice == (f"advice     set deepspeed.stage 3 (about {gib(peaks['ZeRO 3'])} GiB)")


def test_where_nothing_fits_the_exit_code_says_so(words, capsys):
    code, report = planned(capsys, *words, "--gpu-memory", "0.0001")
    assert code == 2
    assert not report["fits"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "0"], "argument --gpus: expected a number above 0, got '0'"),
        (["--gpu-memory", "much"], "argument --gpu-memory: expected a number above 0, got 'much'"),
        (["--gpu-memory", "inf"], "argument --gpu-memory: expected a number above 0, got 'inf'"),
        ([], "this machine has no accelerator; pass the memory of one: --gpu-memory 80"),
    ],
)
def test_bad_hardware_is_refused(options, message, words, capsys):
    assert main(["plan", "sft", *words, *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_number_may_be_large(words, capsys):
    code, report = planned(capsys, *words, "--gpu-memory", "2000000")
    assert code == 0
    assert report["fits"]


def test_sequence_ranks_divide_activations_and_the_states(words, capsys):
    tokens = ("--batch.tokens", "200", "--model.recompute", "none", "--deepspeed.stage", "2")
    options = (*words, *tokens, "--gpus", "4", "--gpu-memory", "1")
    axis = ("--deepspeed.sequence_parallel", "4")
    (_, data), (_, sequence) = (planned(capsys, *options, *more) for more in ((), axis))
    (whole,), (part,) = (
        [row["parts"] for row in report["layouts"] if row["layout"] == "ZeRO 2"]
        for report in (data, sequence)
    )
    assert part["optimizer"] == whole["optimizer"]
    assert part["activations"] < 0.4 * whole["activations"]


def test_a_long_refusal_is_printed_whole(words, tmp_path, capsys):
    axis = ("--deepspeed.tensor_parallel", "3", "--gpus", "3", "--gpu-memory", "1")
    path = tmp_path / ("a" * 80)
    path.symlink_to(words[1])
    assert main(["plan", "sft", "--model", str(path), *words[2:], *axis]) == 2
    assert capsys.readouterr().err == (
        "error: no plan: deepspeed.tensor_parallel is 3, which does not divide the heads and the "
        f"feed-forward layers of {path}; set it to 1\n"
    )


def test_a_plan_refuses_a_sequence_size_that_does_not_divide(words, capsys):
    axis = ("--deepspeed.sequence_parallel", "3")
    assert main(["plan", "sft", *words, *axis, "--gpus", "4", "--gpu-memory", "1"]) == 2
    assert capsys.readouterr().err == (
        "error: deepspeed.sequence_parallel is 3, which does not divide the number of ranks, 4; "
        "set it to 1 or 2 or 4\n"
    )
    assert main(["plan", "sft", *words, *axis, "--gpus", "3", "--gpu-memory", "1"]) == 2
    assert capsys.readouterr().err == (
        "error: no plan: the model has 4 attention heads, which 3 sequence ranks do not "
        "divide; set sequence_parallel to 1\n"
    )
