"""The warm-up of PPO's critic: the policy begins after it, as if it had not been."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rlhf_demo
from rlhf_devkit import tiny
from rlhf_devkit.ranks import Ranks
from rlhf_devkit.tiny import write_rows

REWARD = (
    "def length(completions, **columns):\n    return [float(len(str(c))) for c in completions]\n"
)


def states_of(folder: Path, step: int, model: str) -> dict[str, torch.Tensor]:
    """Return the weights and the states of the optimizer in a checkpoint of one rank."""
    files = (folder / f"checkpoints/step-{step:06}" / model).glob("*.safetensors")
    return {name: value for file in files for name, value in load_file(file).items()}


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.matrix)])
def test_the_warm_up_of_the_critic_leaves_the_policy_as_it_is(
    stage: int, tmp_path: Path, one: Ranks, two: Ranks
) -> None:
    ranks = two if stage else one
    model = tiny.make_model(tmp_path / "model")
    (tmp_path / "rewards.py").write_text(REWARD)
    rows = write_rows(tmp_path / "rows.jsonl", rlhf_demo.rows("arithmetic", "train", "prompt")[:8])
    words = [
        "--model", str(model), "--model.dtype", "fp32", "--data.train", str(rows),
        "--data.workers", "0", "--data.max_tokens", "64", "--batch.size", "4",
        "--ppo.rewards", f"[{tmp_path / 'rewards.py'}:length]", "--ppo.answers", "2",
        "--ppo.max_new_tokens", "6", "--ppo.critic.warmup", "2",
        "--ppo.batches", "2", "--optim.weight_decay", "0.5", "--optim.lr", "1e-2",
        "--optim.schedule", "linear", "--optim.warmup", "0", "--train.steps", "4",
        "--checkpoint.every", "1", "--checkpoint.keep", "4", "--deepspeed.stage", str(stage),
    ]  # fmt: skip
    runs = {name: tmp_path / name for name in ("whole", "stopped")}
    rates = []
    for name, *more in (("whole",), ("stopped", "--train.stop_at", "1"), ("stopped", "--resume")):
        own = [*words, *more, "--output", str(runs[name])]
        metrics = ranks.run(tiny.run, "ppo", own, str(tmp_path / "cache"))[0]
        rates = [line["learning_rate"] for line in metrics if "learning_rate" in line]
        # Its rate begins to fall after the warm-up.
        assert rates == pytest.approx([0, 0, 1e-2, 5e-3][: len(rates)])
    assert len(rates) == 4
    ends = [(path / "model/model.safetensors").read_bytes() for path in runs.values()]
    assert ends[0] == ends[1]
    before = load_file(model / "model.safetensors")
    if not stage:
        during, after = (states_of(runs["whole"], step, "policy") for step in (2, 3))
        assert {name.split("/")[1] for name in during} == {"weight"}
        for name, weight in before.items():
            assert torch.equal(during[f"model.{name}/weight/0"], weight.flatten())
            assert int(after[f"model.{name}/step/0"]) == 1
            assert int(states_of(runs["whole"], 3, "critic")[f"model.{name}/step/0"]) == 3
