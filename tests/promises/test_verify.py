"""`rlhf verify`: the same curve in another layout and after a resume; planted faults are named."""

import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

import sft_runs
from rlhf.commands.main import main
from rlhf.launch.signals import REQUEST
from rlhf.plugin import NoSettings
from rlhf.request.reader import read_config
from rlhf.train.dataset import prepare_data
from rlhf.train.fragments import SavedEngine
from rlhf_devkit.comparison import first_changed
from rlhf_devkit.ranks import shared
from rlhf_devkit.verification import RunShape, Verification
from sft_runs import Inputs

Fault = Callable[[], Any]
PART = "model.model.layers.1.mlp.up_proj.weight"


def dropped_gradient() -> Any:
    """ZeRO-2 loses half of one gradient, as DeepSpeed 0.18.3 to 0.19.3 lost those of a module that
    runs twice."""
    step = DeepSpeedZeroOptimizer.step

    def faulty(self: Any, closure: Any = None) -> Any:
        for params, gradients in zip(
            self.params_in_partition, self.averaged_gradients.values(), strict=True
        ):
            for parameter, gradient in zip(params, gradients, strict=False):
                if self.partition_gradients and self.param_names[parameter] == PART:
                    gradient.view(-1)[: gradient.numel() // 2] = 0
        return step(self, closure)

    return replaced(DeepSpeedZeroOptimizer, "step", faulty)


def with_fp16() -> Any:
    """The CPU taken for an accelerator that has fp16, as not every CPU is."""
    return replaced(get_accelerator(), "is_fp16_supported", lambda: True)


def forgotten_moment() -> Any:
    """A checkpoint's second moment of one weight is not restored."""
    read = SavedEngine.read

    def faulty(self: Any, name: str, kind: str, offset: int, into: torch.Tensor) -> None:
        read(self, name, kind, offset, into)
        if (name, kind) == (PART, "exp_avg_sq"):
            into.zero_()

    return replaced(SavedEngine, "read", faulty)


def no_room_without_sharding() -> Any:
    """Stage 0 takes more memory than there is."""
    from rlhf_plugin_deepspeed import backend

    prepare = backend.prepare_training

    def faulty(*arguments: Any, plan: Any, **more: Any) -> Any:
        if plan.stage == 0:
            raise torch.OutOfMemoryError("out of memory")
        return prepare(*arguments, plan=plan, **more)

    return replaced(backend, "prepare_training", faulty)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def in_rank(request: bytes, cache: str, fault: Fault) -> tuple[int, str]:
    """Run a request in a rank of a pool and return the exit code and output."""
    os.environ["RLHF_CACHE"] = cache
    output = io.StringIO()
    with TemporaryFile(buffering=0) as file, redirect_stdout(output), redirect_stderr(output):
        file.write(request)
        os.environ[REQUEST] = str(file.fileno())
        with fault():
            code = main(["run", "sft"])
    return code, output.getvalue()


class Pooled:
    """Ranks of the shared pools, which have torch and DeepSpeed loaded."""

    def __init__(
        self, command: list[str], count: int, patience: float, *, output: Any, request: bytes,
        cache: Path, fault: Fault, **_: Any,
    ) -> None:  # fmt: skip
        results = shared(count).run(in_rank, request, str(cache), fault)
        self.code = max(code for code, _ in results)
        output.write("".join(text for _, text in results).encode())

    def wait(self) -> int:
        return self.code


@pytest.fixture
def check(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Callable[..., tuple[int, list[str]]]:
    """Run `rlhf verify sft` with a fault in its runs; returns the exit code and the lines."""
    monkeypatch.setenv("RLHF_CACHE", str(inputs.cache))

    def run(*words: str, fault: Fault = nullcontext) -> tuple[int, list[str]]:
        monkeypatch.setattr(
            "rlhf_devkit.verification.Ranks", partial(Pooled, cache=inputs.cache, fault=fault)
        )
        paths = ["--model", str(inputs.model), "--data", str(inputs.train)]
        rest = ["--batch.size", "4", "--data.workers", "0", "--output", str(tmp_path / "run")]
        code = main(["verify", "sft", *paths, "--model.dtype", "fp32", *rest, *words])
        assert list(tmp_path.iterdir()) == []
        printed = capsys.readouterr()
        text = printed.err if code == 2 else printed.out
        return code, re.sub(r"\n {11}(?!differs)", " ", text).splitlines()

    return run


def test_a_run_of_one_rank_is_compared_with_two(check: Any) -> None:
    code, lines = check("--deepspeed.stage", "0")
    assert code == 0, lines
    assert [line.split()[0] for line in lines[:4]] == ["straight", "stopped", "other", "resumed"]
    assert lines[0].startswith("straight   1 rank, stage 0, batch.tokens auto: loss ")
    assert lines[2].startswith("other      2 ranks, stage 2, batch.tokens ")
    assert "deepspeed 0." in lines[4]
    assert lines[5].startswith("same curve to ")
    assert lines[5].endswith(" over ranks, stage and batch.tokens, resume exact")
    assert float(lines[5].split()[3].rstrip(",")) < 1e-5


def test_bf16_has_wider_bounds_and_nothing_is_evaluated(check: Any, inputs: Inputs) -> None:
    words = ["--model.dtype", "bf16", "--nproc", "2", "--deepspeed.stage", "2"]
    words += ["--data.eval", str(inputs.eval), "--train.samples", "2", "--train.eval_every", "1"]
    code, lines = check(*words, "--train.patience", "2", "--checkpoint.best", "eval/loss")
    assert code == 0, lines
    assert lines[2].startswith("other      1 rank, stage 0, ")


def test_lost_gradients_of_zero_2_are_named_with_the_change_that_shows_them(check: Any) -> None:
    code, lines = check("--nproc", "2", "--deepspeed.stage", "2", fault=dropped_gradient)
    assert code == 1, lines
    assert lines[3].startswith(f"           differs in step 1: the gradient of {PART} differs by ")
    single = {
        line.split()[1]: after for line, after in itertools.pairwise(lines) if "by " in line[:3]
    }
    assert {name for name, after in single.items() if "differs" in after} == {"stage"}
    assert lines[-1] == "the curve differs, resume exact"


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.matrix), "bf16"])
def test_a_moment_that_is_not_restored_is_named(check: Any, dtype: str) -> None:
    code, lines = check("--model.dtype", dtype, fault=forgotten_moment)
    assert code == 1, lines
    assert lines[-3] == f"           differs in step 2: the weight of {PART} of the policy"
    assert lines[-1].startswith("same curve to ")
    assert lines[-1].endswith(", resume differs")


def test_with_dropout_only_the_resume_is_checked(check: Any) -> None:
    code, lines = check("--lora", "2", "--lora.dropout", "0.1")
    assert code == 0, lines
    assert lines[-1] == (
        "curve not compared (it depends on ranks and batch.tokens: dropout 0.1 is sampled per "
        "micro-batch), resume exact"
    )


def test_skipped_steps_of_fp16_are_not_compared(check: Any) -> None:
    words = ("--deepspeed.preset", "zero2_fp16", "--model.dtype", "fp16")
    code, lines = check(*words, fault=with_fp16)
    assert code == 0, lines
    assert lines[-1].startswith("same curve to ")
    large = "{fp16: {initial_scale_power: 40}}"
    words = ("--model.dtype", "fp16", "--deepspeed.config", large)
    code, lines = check(*words, fault=with_fp16)
    assert code == 0, lines
    assert lines[-1] == (
        "curve not compared (it skipped 2 of 2 steps to lower the loss scale of fp16), resume exact"
    )


def test_a_layout_that_does_not_fit_is_replaced(check: Any) -> None:
    words = ("--nproc", "2", "--deepspeed.stage", "2")
    code, lines = check(*words, fault=no_room_without_sharding)
    assert code == 0, lines
    assert lines[2].startswith("other      out of memory; ")
    assert lines[3].startswith("other      1 rank, stage 2, batch.tokens ")
    assert lines[-1].endswith(" over ranks and batch.tokens (stage not varied), resume exact")


def test_a_replacement_layout_has_a_number_of_ranks_that_its_axes_divide(
    check: Any,
) -> None:
    words = ("--nproc", "2", "--deepspeed.stage", "1", "--deepspeed.tensor_parallel", "2")
    code, lines = check(*words, fault=no_room_without_sharding)
    assert code == 0, lines
    assert lines[3].startswith("other      2 ranks, stage 1, batch.tokens ")
    assert lines[-1].endswith(" over batch.tokens (ranks and stage not varied), resume exact")


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ((True, False), "ranks, stage and batch.tokens"),
        ((False, False), "ranks and batch.tokens (stage not varied)"),
    ],
)
def test_what_was_varied_is_what_the_runs_did(
    stages: tuple[bool, bool],
    words: str,
    inputs: Inputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backend without the setting `stage` that shards on several ranks."""

    def run(self: Verification, name: str, layout: RunShape) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"curve": "", "devices": "2 x cpu"}))
        stage = stages[layout.ranks == 1]
        (folder / "plan.json").write_text(json.dumps({"policy": {"sharded": stage}}))
        lines = [{"step": step, "loss": 1.0} for step in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    monkeypatch.setattr(Verification, "_run", run)
    monkeypatch.setattr("rlhf_devkit.verification.first_difference", lambda *runs, **options: "")
    monkeypatch.setenv("RLHF_CACHE", str(inputs.cache))
    request = read_config("sft", overrides=sft_runs.words(inputs, tmp_path))
    layout = RunShape(ranks=2, stage=NoSettings(), tokens=128)
    verification = Verification(request, prepare_data(request), tmp_path, layout)
    straight = verification._run("straight", layout)
    assert verification._compare_layouts(straight) == f"same curve to the last bit over {words}"


def test_a_run_that_fails_ends_the_command_with_its_error(check: Any) -> None:
    code, lines = check("--optim.lr", "1e30")
    assert code == 2
    assert lines[0].startswith("error: the run 'straight' failed: step 2: the loss is ")


def test_ranks_of_a_launcher_are_refused(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    error = "error: rlhf verify starts its own ranks on one machine; run it without a launcher"
    assert check() == (2, [error])


def test_a_file_that_is_not_a_tensor_is_named_too(tmp_path: Path) -> None:
    for name, digest in (("a", "1"), ("b", "2")):
        folder = tmp_path / name / "checkpoints/step-000002"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"files": {"run.json": digest}}))
    assert first_changed(tmp_path / "a", tmp_path / "b") == "step 2: run.json"
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "a").rename(tmp_path / "b")
    assert first_changed(tmp_path / "b", tmp_path / "b") == ""


@pytest.mark.matrix
def test_the_command_starts_processes_and_leaves_no_file(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(inputs.cache))
    monkeypatch.chdir(tmp_path)
    words = ["--model", str(inputs.model), "--data", str(inputs.train), "--model.dtype", "fp32"]
    assert main(["verify", "sft", *words, "--batch.size", "4"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out.splitlines()[-1].endswith(", resume exact")
