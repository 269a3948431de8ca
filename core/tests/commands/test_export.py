"""`rlhf export`: the files of the run, and run folders that are not as a run leaves them."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from rlhf.commands.records import export_command
from rlhf.errors import RLHFError
from rlhf.folder import checkpoints as checkpoint
from rlhf.hookspecs import hookimpl
from rlhf.request.reader import read_config
from rlhf.train.exporting import BUCKET, buckets_of, export_checkpoint
from rlhf.train.rank import run_rank
from rlhf_devkit import tiny
from rlhf_devkit.plain import PlainBackend
from rlhf_devkit.problem import Packed, TinyModel


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
def test_a_run_without_a_recorded_trainer_is_refused(text: str | None, tmp_path: Path) -> None:
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


def test_an_existing_output_is_refused(tmp_path: Path) -> None:
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


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a model folder, but for its card."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def exported_run(folder: Path, cache: Path, *more: str) -> Path:
    """The folder of a run in plain torch whose base has settings for generation."""
    words = tiny.short_run(folder, "demonstration")
    settings = GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=2)
    settings.save_pretrained(folder / "model")
    run = folder / "run"
    steps = ("--train.steps", "1", "--checkpoint.keep", "1", "--output", str(run))
    tiny.run("sft", [*words, *steps, *more], str(cache), plain=True)
    return run


@pytest.mark.parametrize("more", [(), ("--lora.rank", "2")])
def test_a_checkpoint_is_exported_to_the_files_of_its_run(
    more: tuple[str, ...], tmp_path: Path, cache: Path
) -> None:
    run = exported_run(tmp_path, cache, *more)
    export_command(str(run), str(tmp_path / "out"))
    assert contents(tmp_path / "out") == contents(run / "model")
    assert b"0.7" in contents(tmp_path / "out")["generation_config.json"]


def test_export_prints_only_what_it_has_exported(tmp_path: Path, cache: Path) -> None:
    run = exported_run(tmp_path, cache)
    # A process that has not imported DeepSpeed yet, whose import logs.
    command = [sys.executable, "-m", "rlhf", "export", str(run), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    newest = run / "checkpoints" / "step-000001"
    assert done.stdout == f"exported {newest} to {tmp_path / 'out'}\n"


def test_a_machine_that_exports_needs_neither_the_base_s_weights_nor_its_quantisation(
    tmp_path: Path, cache: Path
) -> None:
    run = exported_run(tmp_path, cache, "--lora.rank", "2")
    # As a run on CUDA would have written it.
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["quantize"] = "nf4"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "model" / "model.safetensors").unlink()
    export_command(str(run), str(tmp_path / "out"))
    assert contents(tmp_path / "out") == contents(run / "model")


class Lossy(PlainBackend):
    """Exports a model without its last weight."""

    @hookimpl
    def weights(self, engine: Any, buckets: Any) -> Any:
        for bucket in super().weights(engine, buckets):
            yield {name: value for name, value in bucket.items() if "model.norm" not in name}


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        ((), "; the checkpoint is intact, run rlhf export on it"),
        (("--train.eval_every", "1", "--checkpoint.best", "eval/loss"), ""),
    ],
)
def test_an_incomplete_export_names_the_checkpoint_if_there_is_one(
    more: tuple[str, ...], advice: str, tmp_path: Path, cache: Path
) -> None:
    run = tmp_path / "run"
    words = [*tiny.short_run(tmp_path, "demonstration"), "--output", str(run), *more]
    with pytest.raises(RLHFError) as error:
        run_rank(read_config("sft", overrides=words), backend=Lossy())
    assert str(error.value) == (
        f"the export in {run}/.model.part is incomplete: model.norm.weight is missing (expected "
        f"shape [32]){advice}"
    )
    assert (run / "checkpoints").is_dir() == bool(advice)


def test_a_run_that_continues_an_adapter_is_exported_with_its_settings(
    tmp_path: Path, cache: Path
) -> None:
    first = exported_run(tmp_path, cache, "--lora.rank", "2")
    run = tmp_path / "second"
    adapter = ("--model.adapter", str(first / "model"), "--output", str(run))
    words = tiny.short_run(tmp_path, "demonstration")
    tiny.run("sft", [*words, *adapter], str(cache), plain=True)
    export_command(str(run), str(tmp_path / "out"))
    assert contents(tmp_path / "out") == contents(run / "model")


def test_a_checkpoint_with_weights_that_the_model_has_no_place_for_is_refused(
    tmp_path: Path, cache: Path
) -> None:
    run = exported_run(tmp_path, cache)
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 1}))
    folder = run / "checkpoints" / "step-000001"
    assert message(run, tmp_path / "out") == (
        f"{folder} has weights that LlamaForCausalLM has no place for: "
        "model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight and 6 others; restore the model.path with which it "
        "was trained"
    )


def test_weights_are_pulled_in_buckets_of_bounded_bytes_a_tied_one_once() -> None:
    module = Packed()
    buckets = [*buckets_of(module, 2048)]
    parameters = dict(module.named_parameters())
    assert [name for bucket in buckets for name in bucket] == [*parameters, "model.scale"]
    state = module.state_dict()
    sizes = [[4 * state[name].numel() for name in bucket] for bucket in buckets]
    assert all(sum(each) <= 2048 or len(each) == 1 for each in sizes)
    assert all(sum(one) + other[0] > 2048 for one, other in itertools.pairwise(sizes))


def test_of_a_model_with_an_adapter_only_the_adapter_is_pulled() -> None:
    model = get_peft_model(TinyModel(), LoraConfig(r=2, target_modules=["up"]))
    (names,) = buckets_of(Packed(model), BUCKET)
    assert len(names) == 4
    assert all(".lora_" in name for name in names)
