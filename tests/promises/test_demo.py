"""The first thing a newcomer sees: `rlhf run sft` without arguments."""

import io
import os
import re
from contextlib import chdir, redirect_stdout
from pathlib import Path

import attrs
import pytest

import sft_runs
from rlhf.commands.main import main
from rlhf.request.reader import read_config
from rlhf.train.rank import run_rank
from rlhf_devkit import Ranks
from rlhf_devkit.plain import PlainBackend
from rlhf_plugin_deepspeed.config import check, resolve
from sft_runs import Inputs


def demo_in(folder: str, cache: str) -> tuple[int, str]:
    """`rlhf run sft` in a folder, in a rank of the pool: exit code and output."""
    before = dict(os.environ)
    try:
        del os.environ["RANK"]
        os.environ["RLHF_CACHE"] = cache
        with chdir(folder), redirect_stdout(io.StringIO()) as output:
            return main(["run", "sft"]), output.getvalue()
    finally:
        # A library that tokenises in several processes puts a copy in the place of os.environ.
        os.environ.clear()
        os.environ.update(before)


def test_the_demo_trains_and_shows_what_was_learnt(tmp_path: Path, one: Ranks) -> None:
    ((code, output),) = one.run(demo_in, str(tmp_path), str(tmp_path / "cache"), timeout=3000)
    assert code == 0
    assert "demo: the embedded model and rows" in output.splitlines()[0]
    loss = re.search(r"loss per token +([\d.]+) +([\d.]+)", output)
    exact = re.search(r"right answers, of 100 +(\d+) +(\d+)", output)
    assert loss is not None
    assert exact is not None
    assert float(loss[2]) < 0.5 * float(loss[1])
    assert int(exact[1]) < 10
    assert int(exact[2]) > 50
    assert output.count("\n> ") == 3
    assert (tmp_path / "runs" / "sft-1" / "model" / "model.safetensors").is_file()


def test_a_report_that_fails_does_not_fail_the_finished_run(
    inputs: Inputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(inputs.cache))
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "1")
    request = read_config("sft", overrides=words)
    plugin = attrs.evolve(request.plugin, report="json:loads")
    run_rank(attrs.evolve(request, demo=True, plugin=plugin), backend=PlainBackend())
    written = tmp_path / "run" / "errors" / "report.txt"
    assert capsys.readouterr().out.splitlines()[-1] == (
        "report     failed: TypeError: loads() takes 1 positional argument but 2 were given; "
        f"see {written}"
    )
    assert written.read_text().startswith("Traceback (most recent call last):")


@pytest.mark.parametrize("trainer", ["sft", "dpo", "rm", "kd", "kto", "prm", "grpo", "ppo", "ilql"])
@pytest.mark.parametrize("words", [["--deepspeed", "zero2"], ["--deepspeed.stage", "2"]], ids=str)
def test_a_demo_runs_under_the_stage_that_is_given(trainer: str, words: list[str]) -> None:
    config = read_config(trainer, overrides=words).config
    check(config)
    assert resolve(config.backend_section).stage == 2
