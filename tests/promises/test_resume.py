"""Resume is exact: a resumed run is the same, bit for bit, as one that never stopped."""

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import sft_runs
from rlhf.commands.main import main
from rlhf.folder import checkpoints as checkpoint
from rlhf.folder.disk import sha256
from rlhf.train import rank as rank_run
from rlhf_devkit import column
from rlhf_devkit.ranks import Ranks
from sft_runs import Inputs

ROUNDED = ("--model.dtype", "bf16", "--optim.states", "bf16")
"""The optimizer draws random numbers: they continue from where they were."""
STAGES = {
    "0": ("--deepspeed.stage", "0"),
    "1": ("--deepspeed.stage", "1"),
    "2": ("--deepspeed.stage", "2"),
    # Norms stay whole on every rank.
    "3": ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "100"),
    "0 in bf16": ("--deepspeed.stage", "0", *ROUNDED),
    "1 in bf16": ("--deepspeed.stage", "1", *ROUNDED),
    "2 in bf16": ("--deepspeed.stage", "2", *ROUNDED),
    "3 in bf16": ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0", *ROUNDED),
    "0 with dropout": ("--deepspeed.stage", "0", "--lora.rank", "4", "--lora.dropout", "0.3"),
    "2 offloaded": ("--deepspeed.stage", "2", "--deepspeed.offload_optimizer", "true"),
}
MORE = ("0", "1", "2", "3", "0 in bf16", "1 in bf16", "2 in bf16", "2 offloaded")
"""The kit of backends resumes runs in fp32 at these stages too."""
LENGTH = ("--train.steps", "10", "--optim.schedule", "cosine", "--checkpoint.every", "3")


@pytest.mark.parametrize(
    "stage",
    [pytest.param(name, marks=pytest.mark.matrix) if name in MORE else name for name in STAGES],
)
def test_five_steps_and_five_more_are_ten_steps_to_the_last_bit(
    stage: str, inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    def run(folder: str, *more: str) -> list[dict[str, float]]:
        words = sft_runs.words(inputs, tmp_path / folder, *STAGES[stage], *LENGTH, *more)
        (_, metrics), _ = two.run(sft_runs.run, words, str(inputs.cache))
        return metrics

    straight = run("straight")
    run("halves", "--train.stop_at", "5")
    halves = run("halves", "--resume")
    for name in ("loss", "grad_norm", "learning_rate", "entropy", "num_tokens", "epoch"):
        assert column(halves, name) == column(straight, name), name
    assert halves[-1]["eval/loss"] == straight[-1]["eval/loss"]
    assert weights(tmp_path / "halves") == weights(tmp_path / "straight")


def digests_read(words: list[str], cache: str) -> list[str]:
    """Run `rlhf run sft` without a launcher; return the files of checkpoints that were read to
    verify them."""
    names: list[str] = []

    def counted(path: Path) -> str:
        if ".part" not in str(path):
            names.append(path.name)
        return sha256(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_CACHE", cache)
        patch.delenv("RANK")
        patch.setattr(checkpoint, "sha256", counted)
        assert main(["run", "sft", *words, "--nproc", "1"]) == 0
    return names


def test_a_resumed_run_reads_each_file_of_its_checkpoint_once(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "4", "--train.stop_at", "2")
    one.run(sft_runs.run, words, str(inputs.cache))
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    files = {path.name for path in folder.rglob("*") if path.is_file()}
    words = [*words, "--train.stop_at", "4", "--resume"]
    (names,) = one.run(digests_read, words, str(inputs.cache))
    assert len(names) == len(set(names))
    assert {*names, "manifest.json"} == files


def weights(folder: Path) -> bytes:
    (file,) = (folder / "model").glob("*model.safetensors")
    return file.read_bytes()


def test_resuming_a_finished_run_takes_no_step_and_says_so(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "2")
    ((_, before),) = one.run(sft_runs.run, words, str(inputs.cache))
    ((code, after),) = one.run(sft_runs.run, [*words, "--resume"], str(inputs.cache))
    assert code == 0
    assert after == before


def test_a_run_that_has_reached_stop_at_takes_no_more_steps(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "4", "--train.stop_at", "2")
    ((text, before),) = one.run(sft_runs.printed, words, str(inputs.cache))
    assert text.splitlines()[-2] == (
        "stopped    at step 2 of 4 by train.stop_at; remove it and pass --resume to continue"
    )
    ((text, after),) = one.run(sft_runs.printed, [*words, "--resume"], str(inputs.cache))
    assert after == before
    # One line about it, and no other.
    assert text.splitlines()[-1] == f"nothing left to do: {tmp_path / 'run'}/model is finished"
    assert "resumed" not in text


@pytest.mark.parametrize("earlier", [(), ("--train.stop_at", "2")])
def test_a_run_that_was_killed_before_its_export_writes_its_last_evaluation_once(
    inputs: Inputs, one: Ranks, tmp_path: Path, earlier: tuple[str, ...]
) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "4", "--resume")
    if earlier:  # Its model is in the folder already.
        one.run(sft_runs.run, [*words, *earlier], str(inputs.cache))
    one.run(killed_in_export, words, str(inputs.cache))
    ((text, metrics),) = one.run(sft_runs.printed, words, str(inputs.cache))
    assert "resumed    step-000004, 0 steps to go\n" in text
    assert text.splitlines()[-1] == f"model      {tmp_path / 'run'}/model"
    assert column(metrics, "step") == [1, 2, 3, 4]
    assert [row["step"] for row in metrics if "eval/loss" in row] == [2] * bool(earlier) + [4]
    straight = sft_runs.words(inputs, tmp_path / "straight", "--train.steps", "4")
    one.run(sft_runs.run, straight, str(inputs.cache))
    assert weights(tmp_path / "run") == weights(tmp_path / "straight")


def killed_in_export(words: list[str], cache: str) -> None:
    """Run until the model is exported, and no further."""

    def killed(session: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(rank_run, "export_model", killed)
        sft_runs.run(words, cache)


BACKEND = """
from attrs import frozen
from rlhf.plugin import BackendPlugin

@frozen(kw_only=True)
class BareConfig:
    shard: bool = False

plugin = BackendPlugin(config=BareConfig, hooks="rlhf_devkit.plain:PlainBackend")
"""


def run_with_another_backend(site: Path, words: list[str], cache: str) -> list[dict[str, Any]]:
    """Run where a second backend is installed; returns the metrics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        _, metrics = sft_runs.run(words, cache)
    return metrics


@pytest.mark.parametrize(
    ("first", "second"),
    [("bare", "deepspeed --deepspeed.stage 1"), ("deepspeed", "bare --bare.shard true")],
)
def test_a_run_continues_with_another_backend(
    first: str, second: str, inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    info = tmp_path / "bare-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: bare\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlhf.backends]\nbare = bare_backend:plugin\n")
    (tmp_path / "bare_backend.py").write_text(BACKEND)

    def run(folder: str, backend: str, *more: str) -> list[float]:
        words = ["--backend", *backend.split(), "--train.steps", "4", *more]
        words = sft_runs.words(inputs, tmp_path / folder, *words)
        (metrics,) = one.run(run_with_another_backend, tmp_path, words, str(inputs.cache))
        return column(metrics, "loss")

    straight = run("straight", first)
    run("halves", first, "--train.stop_at", "2")
    assert run("halves", second, "--resume") == pytest.approx(straight, rel=1e-5)


def test_resume_without_a_run_starts_one(inputs: Inputs, one: Ranks, tmp_path: Path) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "2", "--resume")
    ((code, metrics),) = one.run(sft_runs.run, words, str(inputs.cache))
    assert code == 0
    assert len(column(metrics, "loss")) == 2


def test_another_token_budget_may_resume_and_another_batch_size_may_not(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "4", "--train.stop_at", "2")
    one.run(sft_runs.run, words, str(inputs.cache))
    (error,) = one.errors(
        sft_runs.run, [*words, "--resume", "--batch.size", "8"], str(inputs.cache)
    )
    assert (
        f"{tmp_path / 'run'} cannot be resumed with another configuration: "
        "batch.size: 4 -> 8" in error
    )
    more = ["--resume", "--batch.tokens", "1024", "--train.stop_at", "4"]
    ((code, _),) = one.run(sft_runs.run, [*words, *more], str(inputs.cache))
    assert code == 0


def test_changed_rows_under_the_same_name_are_refused(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(inputs.train.read_bytes())
    words = [
        *sft_runs.words(inputs, tmp_path / "run"),
        "--data.train",
        str(rows),
        "--train.steps",
        "4",
    ]
    one.run(sft_runs.run, [*words, "--train.stop_at", "2"], str(inputs.cache))
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[1:]))
    message = (
        r"step-000002 was written in training on 22 examples of 1,168 tokens but data.train "
        r"now has 21 of 1,1\d\d; restore the old rows, or start again with --overwrite"
    )
    (error,) = one.errors(sft_runs.run, [*words, "--resume"], str(inputs.cache))
    assert re.search(message, error)


def test_rows_in_another_order_are_refused(inputs: Inputs, one: Ranks, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(inputs.train.read_bytes())
    words = sft_runs.words(inputs, tmp_path / "run", "--data.train", str(rows))
    one.run(sft_runs.run, [*words, "--train.stop_at", "2"], str(inputs.cache))
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[::-1]))
    message = (
        "step-000002 was written in training on 22 examples of 1,168 tokens but data.train now has "
        "as many with other content or in another order; restore the old rows, or start again with "
        "--overwrite"
    )
    (error,) = one.errors(sft_runs.run, [*words, "--resume"], str(inputs.cache))
    assert message in error


def test_another_base_under_an_adapter_is_refused_but_not_under_trained_weights(
    inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(inputs.model, model)

    def words(name: str, *more: str) -> list[str]:
        same = ("--model", str(model), "--train.steps", "4", "--train.stop_at", "2")
        return sft_runs.words(inputs, tmp_path / name, *same, *more)

    two.run(sft_runs.run, words("whole"), str(inputs.cache))
    two.run(sft_runs.run, words("adapter", "--lora.rank", "2"), str(inputs.cache))
    weights = {name: it + 1 for name, it in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    more = ("--resume", "--train.stop_at", "4")
    two.run(sft_runs.run, words("whole", *more), str(inputs.cache))
    errors = two.errors(
        sft_runs.run, words("adapter", "--lora.rank", "2", *more), str(inputs.cache)
    )
    message = (
        f"{model} has other weights than when {tmp_path}/adapter/checkpoints/step-000002 was "
        "written, which has no copy of these frozen weights; restore the old files or set "
        "model.revision to the old commit, or start again with --overwrite"
    )
    assert all(message in error for error in errors)


def test_another_model_in_the_old_folder_is_refused_before_its_weights_are_read(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(inputs.model, model)
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "4", "--model", str(model))
    one.run(sft_runs.run, [*words, "--train.stop_at", "2"], str(inputs.cache))
    config = model / "config.json"
    wider = json.loads(config.read_text()) | {"intermediate_size": 24}
    config.write_text(json.dumps(wider))
    (model / "model.safetensors").unlink()
    message = (
        r"step-000002 is a checkpoint of another model: model\.model\.layers\.0\.mlp\.gate_proj"
        r"\.weight is of shape \[\d+, \d+\] in it but has the shape \[24, \d+\] in this run; "
        r"restore the old model, or start again with --overwrite"
    )
    (error,) = one.errors(sft_runs.run, [*words, "--resume"], str(inputs.cache))
    assert re.search(message, error)


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_resumes_by_name(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    words = sft_runs.words(
        inputs, tmp_path / "run", "--train.steps", "4", "--checkpoint.every", "2"
    )
    ((_, straight),) = one.run(sft_runs.run, words, str(inputs.cache))
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-000004" / "random-00000.safetensors").write_bytes(b"torn")
    (error,) = one.errors(sft_runs.run, [*words, "--resume"], str(inputs.cache))
    assert "continue from the previous one with --resume step-000002" in error
    ((_, again),) = one.run(sft_runs.run, [*words, "--resume", "step-000002"], str(inputs.cache))
    assert column(again, "loss") == column(straight, "loss")
    assert checkpoint.damage(folder / "step-000004") is None


def test_resuming_an_older_checkpoint_hides_newer_ones_until_the_next_save(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    words = sft_runs.words(
        inputs, tmp_path / "run", "--train.steps", "6", "--checkpoint.every", "2"
    )
    ((_, straight),) = one.run(sft_runs.run, words, str(inputs.cache))
    back = [*words, "--resume", "step-2", "--checkpoint.every", "3", "--train.stop_at"]
    one.run(sft_runs.run, [*back, "3"], str(inputs.cache))
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"step-000002", "step-000003"}
    ((_, again),) = one.run(sft_runs.run, [*words, "--resume"], str(inputs.cache))
    assert column(again, "loss") == column(straight, "loss")
    assert column(again, "step") == [1, 2, 3, 4, 5, 6]


def test_a_run_that_is_out_of_time_saves_and_resumes(
    inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "6")
    (code, metrics), _ = two.run(sft_runs.run, [*words, "--train.hours", "1e-9"], str(inputs.cache))
    done = len(column(metrics, "loss"))
    assert code == 0
    assert 0 < done < 6
    (code, metrics), _ = two.run(sft_runs.run, [*words, "--resume"], str(inputs.cache))
    assert code == 0
    assert column(metrics, "step") == [1, 2, 3, 4, 5, 6]
