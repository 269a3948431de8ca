"""What a resumed run must find as it was: the training rows, and weights that checkpoints lack."""

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from pair_runs import make_run, write_inputs
from safetensors.torch import load_file, save_file

from rlhf.config.sections import LoraConfig, ModelConfig
from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.readouts import token_logprobs
from rlhf.reference import digest
from rlhf.reference.digest import quick_digests
from rlhf.train.checkpointing import check_data, check_frozen
from rlhf.train.context import RunContext
from rlhf_devkit import tiny

pytestmark = pytest.mark.usefixtures("cache")
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_inputs(tmp_path)


def checkpoint(folder: Path, **state: Any) -> Path:
    """A folder with the run's own state of a checkpoint."""
    (folder / "step-2").mkdir()
    (folder / "step-2/run.json").write_text(json.dumps(state))
    return folder / "step-2"


def change(folder: Path, name: str, place: int) -> None:
    """Change one element of a tensor in a model folder."""
    tensors = load_file(folder / WEIGHTS)
    tensors[name].view(-1)[place] += 1
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def swapped(pair: dict[str, Any]) -> dict[str, Any]:
    return {**pair, "chosen": pair["rejected"], "rejected": pair["chosen"]}


@pytest.mark.parametrize("changed", ["order", "answers"])
def test_other_rows_of_the_same_size_are_refused(folder: Path, changed: str) -> None:
    before = make_run(folder).examples[0]
    data = [len(before), int(before.lengths.sum()), before.files[0].content]
    saved = checkpoint(folder, data=data)
    check_data(saved, before, Mesh())
    rows = (folder / "pairs.jsonl").read_text().splitlines()
    if changed == "order":
        rows.reverse()
    else:
        rows[0] = json.dumps(swapped(json.loads(rows[0])))
    (folder / "pairs.jsonl").write_text("\n".join(rows))
    after = make_run(folder).examples[0]
    with pytest.raises(RLHFError) as error:
        check_data(saved, after, Mesh())
    assert str(error.value) == (
        f"{saved} was written in training on 12 examples of {data[1]:,} tokens but data.train now "
        "has as many with other content or in another order; restore the old rows, or start again "
        "with --overwrite"
    )


def test_a_checkpoint_without_a_digest_compares_counts(folder: Path) -> None:
    examples = make_run(folder).examples[0]
    data = [len(examples), int(examples.lengths.sum())]
    check_data(checkpoint(folder, data=data), examples, Mesh())


def reads_an_adapters_base(run: RunContext) -> object:
    return run.load("policy")


def reads_a_reference(run: RunContext) -> object:
    return run.reference("engine")


def reads_a_cached_reference(run: RunContext) -> object:
    return run.reference("cache")


def reads_a_judge(run: RunContext) -> object:
    return run.load("judge", model=run.config.model, trained=False)


def reads_a_cached_judge(run: RunContext) -> object:
    def compute(engine: Any, batch: Any) -> torch.Tensor:
        logprobs: torch.Tensor = engine(batch, token_logprobs)["logprobs"]
        return logprobs

    return run.attach("judge", run.config.model, compute, key="logprobs")


@pytest.mark.parametrize(
    "read",
    [
        reads_an_adapters_base,
        reads_a_reference,
        reads_a_cached_reference,
        reads_a_judge,
        reads_a_cached_judge,
    ],
)
def test_other_frozen_weights_in_the_old_folder_are_refused(folder: Path, read: Any) -> None:
    adapter = LoraConfig(rank=2) if read is reads_an_adapters_base else None
    first, again = make_run(folder), make_run(folder)
    for run in (first, again):
        if adapter is not None:
            run.release("policy")
            run.config = attrs.evolve(run.config, lora=adapter)
    assert first.frozen_files() == {}
    read(first)
    model = str(folder / "model")
    assert list(first.frozen_files()) == [model]
    saved = checkpoint(folder, frozen=first.frozen_files())
    check_frozen(saved, first.frozen_files())
    change(folder / "model", "model.layers.0.mlp.up_proj.weight", 1024)
    again.resumed = saved
    if adapter is not None:
        again.resumed = shapes_of(saved, first)
    with pytest.raises(RLHFError) as error:
        read(again)
    roles = {reads_an_adapters_base: "", reads_a_judge: "judge: ", reads_a_cached_judge: "judge: "}
    role = roles.get(read, "reference: ")
    assert str(error.value) == (
        f"{role}{model} has other weights than when {saved} was written, which has no copy of "
        "these frozen weights; restore the old files or set model.revision to the old commit, or "
        "start again with --overwrite"
    )


def shapes_of(saved: Path, run: RunContext) -> Path:
    """Write the shapes of the policy into the checkpoint, which a resumed run compares first."""
    parameters = run.roles["policy"].engine.module.named_parameters()
    shapes = {name: list(parameter.shape) for name, parameter in parameters}
    (saved / "policy").mkdir()
    (saved / "policy/state.json").write_text(json.dumps({"shapes": shapes, "more": {}}))
    return saved


def test_weights_that_a_checkpoint_holds_may_change_in_the_folder(folder: Path) -> None:
    run = make_run(folder)
    run.reference("engine", every=2)
    assert run.frozen_files() == {}


def test_a_checkpoint_without_digests_of_frozen_weights_is_accepted(folder: Path) -> None:
    check_frozen(checkpoint(folder), {"model": "0"})


def test_the_quick_digest_reads_a_block_of_every_tensor(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "BLOCK", 16)
    model = ModelConfig(path=str(folder / "model"))
    digests = [*quick_digests(model, adapter=False).values()]
    tensors = load_file(folder / "model" / WEIGHTS)
    for name, tensor in tensors.items():
        change(folder / "model", name, tensor.numel() // 2)
        digests += quick_digests(model, adapter=False).values()
    assert len({*digests}) == len(tensors) + 1
    # This is what it misses.
    change(folder / "model", "lm_head.weight" if "lm_head.weight" in tensors else name, 0)
    assert [*quick_digests(model, adapter=False).values()] == digests[-1:]


def test_the_quick_digest_reads_what_is_loaded(folder: Path, tmp_path: Path) -> None:
    model = ModelConfig(path=str(folder / "model"), adapter=str(tmp_path / "adapter"))
    shutil.copytree(folder / "model", tmp_path / "adapter")
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    (tmp_path / "adapter" / WEIGHTS).rename(tmp_path / "adapter/adapter_model.safetensors")
    before = quick_digests(model, adapter=True)
    assert list(before) == [model.path, model.adapter]
    assert quick_digests(model, adapter=False) == {model.path: before[model.path]}
    # What git-lfs leaves of a file that was not downloaded.
    (folder / "model/consolidated.safetensors").write_text("version https://git-lfs.github.com")
    (folder / "model/training_args.bin").write_text("")
    assert quick_digests(model, adapter=True) == before


def test_the_quick_digest_reads_all_shards_and_old_formats(folder: Path) -> None:
    model = ModelConfig(path=str(folder / "model"))
    (folder / "model" / WEIGHTS).rename(folder / "model/a.safetensors")
    index = {"weight_map": {"first": "a.safetensors", "second": "b.bin", "third": "b.bin"}}
    (folder / "model/model.safetensors.index.json").write_text(json.dumps(index))
    torch.save({"second": torch.zeros(9)}, folder / "model/b.bin")
    before = quick_digests(model, adapter=False)
    torch.save({"second": torch.ones(9)}, folder / "model/b.bin")
    after = quick_digests(model, adapter=False)
    assert before[model.path] != after[model.path]


def test_random_weights_and_absent_ones_have_no_quick_digest(folder: Path) -> None:
    model = ModelConfig(path=str(folder / "model"), init="random")
    assert quick_digests(model, adapter=True) == {}
    (folder / "model" / WEIGHTS).unlink()
    assert quick_digests(attrs.evolve(model, init="pretrained"), adapter=True) == {}


def test_a_checkpoint_with_weights_that_the_model_has_no_place_for_is_not_resumed(
    tmp_path: Path, cache: Path
) -> None:
    words = [*tiny.short_run(tmp_path, "demonstration"), "--output", str(tmp_path / "run")]
    tiny.run("sft", [*words, "--train.stop_at", "1"], str(cache), plain=True)
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 1}))
    with pytest.raises(RLHFError) as error:
        tiny.run("sft", [*words, "--resume"], str(cache), plain=True)
    assert str(error.value) == (
        f"{tmp_path}/run/checkpoints/step-000001 is a checkpoint of another model: this run has no "
        "place for model.model.layers.1.input_layernorm.weight, "
        "model.model.layers.1.mlp.down_proj.weight, model.model.layers.1.mlp.gate_proj.weight and "
        "6 others; restore the old model, or start again with --overwrite"
    )
