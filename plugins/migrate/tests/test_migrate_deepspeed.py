"""`rlhf migrate`: what becomes of DeepSpeed's JSON, which files of other projects name."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.cli import main

THEIRS = "model_name_or_path: org/model\nstage: sft\ndeepspeed: ds.json\n"


def migrated(folder: Path, **content: Any) -> tuple[dict[str, Any], str]:
    """The section `deepspeed` that `rlhf migrate` writes for a run of LLaMA-Factory with this
    content of DeepSpeed's JSON, and the comments above it."""
    theirs, ours = folder / "sft.yaml", folder / "ours.yaml"
    theirs.write_text(THEIRS)
    (folder / "ds.json").write_text(json.dumps(content))
    ours.unlink(missing_ok=True)
    assert main(["migrate", str(theirs), "-o", str(ours)]) == 0
    written = ours.read_text()
    return yaml.safe_load(written).get("deepspeed", {}), written.partition("deepspeed:\n")[0]


@pytest.mark.parametrize(
    ("stage", "ratio", "expected"), [(3, 0.3, {"offload_ratio": 0.3}), (2, 0.3, {}), (3, 0, {})]
)
def test_a_part_of_the_optimizer_may_be_on_the_cpu(
    stage: int, ratio: float, expected: dict[str, float], tmp_path: Path
) -> None:
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
    zero["offload_param"] = None
    ours, _ = migrated(tmp_path, zero_optimization=zero)
    assert ours == {"stage": stage, "offload_optimizer": True} | expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not valid JSON: Expecting property name enclosed in double quotes"),
        ("[]", "has no settings of DeepSpeed: it is not a JSON object"),
    ],
)
def test_the_file_must_have_settings(
    text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, file = tmp_path / "sft.yaml", tmp_path / "ds.json"
    theirs.write_text(THEIRS)
    file.write_text(text)
    assert main(["migrate", str(theirs)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {file} {problem}")


def test_offload_to_nvme_becomes_a_folder(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": "/nvme"}
    zero = {"stage": 3, "offload_optimizer": disk, "offload_param": disk}
    ours, comments = migrated(tmp_path, zero_optimization=zero)
    assert ours == {
        "stage": 3, "offload_optimizer": True, "offload_param": True, "nvme_path": "/nvme",
    }  # fmt: skip
    assert "offload_param" not in comments
    for changed, note in (
        (zero | {"offload_optimizer": {"device": "nvme"}, "offload_param": {}},
         "offload_optimizer: set deepspeed.nvme_path to a folder"),
        (zero | {"offload_optimizer": {}},
         "offload_param: the weights stay in memory; nvme_path needs offload_optimizer"),
    ):  # fmt: skip
        ours, comments = migrated(tmp_path, zero_optimization=changed)
        assert "nvme_path" not in ours
        assert f"- deepspeed {note}" in comments
    mixed = zero | {"offload_optimizer": {"device": "cpu"}}
    ours, comments = migrated(tmp_path, zero_optimization=mixed)
    assert ours["nvme_path"] == "/nvme"
    assert "- deepspeed offload_param: nvme_path has all that is offloaded, the optimiz" in comments


def test_groups_of_ranks_are_read_and_other_keys_are_listed(tmp_path: Path) -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 8, "zero_quantized_weights": True}
    ours, comments = migrated(
        tmp_path,
        zero_optimization=zero | {"overlap_comm": True, "zero_quantized_gradients": False},
        tensor_parallel={"autotp_size": 2},
        sequence_parallel_size=4,
        compile={"deepcompile": True},
    )
    assert ours == {
        "stage": 3, "hpz_partition_size": 8, "tensor_parallel": 2, "sequence_parallel": 4,
    }  # fmt: skip
    assert "- deepspeed zero_quantized_weights: what ranks exchange is not rounded" in comments
    names = ("compile", "overlap_comm", "zero_quantized_gradients")
    unneeded = comments.partition("# Not needed here: ")[2]
    assert all(f"deepspeed {name}" in unneeded for name in names)
    # At other stages, LLaMA-Factory ignores it.
    ours, _ = migrated(tmp_path, zero_optimization=zero | {"stage": 2})
    assert ours == {"stage": 2}


AUTO = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}


@pytest.mark.parametrize(
    ("key", "value", "is_lost"),
    [
        ("optimizer", AUTO, False),
        ("optimizer", AUTO | {"type": "Lion"}, True),
        ("optimizer", AUTO | {"params": {"lr": 1e-3}}, True),
        ("scheduler", {"type": "WarmupLR"}, True),
    ],
)
def test_an_optimizer_of_its_own_changes_what_is_learned(
    key: str, value: Any, is_lost: bool, tmp_path: Path
) -> None:
    _, comments = migrated(tmp_path, **{key: value})
    assert (f"- deepspeed {key}: set it in optim" in comments) == is_lost
    assert (f"Not needed here: deepspeed {key}" in comments) == (not is_lost)
