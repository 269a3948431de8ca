"""`rlhf export` of a run folder that is not as a run leaves it."""

from pathlib import Path

import pytest

from rlhf.commands.export import export_command
from rlhf.errors import RLHFError
from rlhf.folder import checkpoints as checkpoint
from rlhf.loop.exporting import export_checkpoint


def made(folder: Path) -> Path:
    """A run folder with one whole checkpoint and nothing that says whose it is."""
    part = checkpoint.begin(folder / "checkpoints", 1)
    (part / "weights").write_text("weights")
    checkpoint.digest(part, [part / "weights"])
    checkpoint.commit(folder / "checkpoints", 1)
    (folder / "config.yaml").write_text("model: {path: gone}")
    return folder


def message(source: Path, output: Path) -> str:
    with pytest.raises(RLHFError) as error:
        export_command(str(source), str(output))
    return str(error.value)


@pytest.mark.parametrize("text", [None, "{}", "[]", '{"trainer'])
def test_a_run_that_does_not_say_its_trainer(text: str | None, tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    if text is not None:
        (run / "versions.json").write_text(text)
    assert message(run, tmp_path / "out") == (
        f"{run}/versions.json lacks trainer; a run writes this file at its start, so restore it or "
        "resume the run once"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_folders_that_are_not_checkpoints_are_refused(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    for source in (tmp_path / "gone", run / "config.yaml", tmp_path):
        assert message(source, tmp_path / "out") == (
            f"{source} is not a checkpoint of a run; pass RUN/checkpoints/step-NNNNNN or RUN"
        )
    assert message(run / "checkpoints" / "step-000002", tmp_path / "out") == (
        f"no checkpoint 'step-000002' in {run}/checkpoints; available: step-000001"
    )


def test_a_checkpoint_is_found_from_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path / "run")
    monkeypatch.chdir(run / "checkpoints")
    assert message(Path("step-000001"), tmp_path / "out") == (
        f"{run}/versions.json lacks trainer; a run writes this file at its start, so restore it or "
        "resume the run once"
    )


def test_a_plan_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    with pytest.raises(RLHFError) as error:
        export_checkpoint(run / "checkpoints" / "step-000001", run)
    assert str(error.value) == (
        f"{run}/plan.json is missing or damaged; a run writes this file at its start, so restore "
        "it or resume the run once"
    )


def test_an_output_that_is_taken(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    assert message(run, run) == f"{run} is not empty; choose a new folder"
    assert message(run, run / "config.yaml") == f"{run}/config.yaml is a file; choose a new folder"


def test_a_damaged_newest_names_the_command_for_the_one_before(tmp_path: Path) -> None:
    run = made(tmp_path / "run {a}")
    checkpoint.digest(checkpoint.begin(run / "checkpoints", 2), [])
    checkpoint.commit(run / "checkpoints", 2)
    (run / "checkpoints" / "step-000002" / "manifest.json").write_text("{}")
    for source in (run, run / "checkpoints" / "step-000002"):
        assert message(source, tmp_path / "out").endswith(
            f"; export the previous one with rlhf export {run}/checkpoints/step-000001 OUT"
        )
