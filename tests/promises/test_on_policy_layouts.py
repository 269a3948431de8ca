"""GRPO and PPO give one curve under every layout: four ranks, layers divided over two ranks, and
rows divided over two ranks, with answers of the embedded engine and with recorded ones."""

from pathlib import Path

import pyarrow as pa
import pytest
from attrs import field, frozen

import rlhf_demo
from rlhf_devkit import tiny
from rlhf_devkit.curves import Metrics, column, same_curve
from rlhf_devkit.ranks import shared

TENSOR = ("--deepspeed.tensor_parallel", "2")
SEQUENCE = ("--deepspeed.sequence_parallel", "2")
IN_SHARDS = ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0")
LAYOUTS = {
    "4 ranks, stage 3": (4, IN_SHARDS),
    "2 ranks, tensor": (2, (*TENSOR, "--deepspeed.stage", "0")),
    "4 ranks, tensor": (4, (*TENSOR, "--deepspeed.stage", "2")),
    "2 ranks, sequence": (2, (*SEQUENCE, "--deepspeed.stage", "1")),
    "4 ranks, sequence": (4, (*SEQUENCE, *IN_SHARDS)),
}
REWARD = """
def few_letters(completions, **columns):
    texts = [each[0]["content"] for each in completions]
    return [-float(sum(letter.isalpha() for letter in text)) for text in texts]
"""
TRAINERS = {
    "grpo": ("--grpo.preset", "grpo", "--grpo.kl.beta", "0.1", "--grpo.entropy", "0.1"),
    "ppo": ("--ppo.kl.beta", "0.1", "--ppo.critic.optim.lr", "1e-3"),
}
"""Two rollouts, each of which serves two batches in two passes."""
ROLLOUTS = ("1.arrow", "5.arrow", "eval-4.arrow")


@frozen
class Runs:
    """The inputs, and the run of each trainer in plain torch on one rank."""

    folder: Path
    plain: dict[str, Metrics] = field(factory=dict)

    def words(self, trainer: str, output: Path, *more: str) -> list[str]:
        own = {
            "rewards": f"{self.folder / 'reward.py'}:few_letters",
            "answers": "3", "max_new_tokens": "6", "batches": "2", "passes": "2",
        }  # fmt: skip
        words = [word for name, value in own.items() for word in (f"--{trainer}.{name}", value)]
        return [
            "--model", str(self.folder / "model"), "--model.dtype", "fp32",
            "--data.train", str(self.folder / "train.jsonl"),
            "--data.eval", str(self.folder / "eval.jsonl"), "--data.workers", "0",
            "--data.max_tokens", "64", "--batch.size", "4", "--batch.tokens", "256",
            "--optim.lr", "1e-3", "--train.steps", "8", "--train.eval_every", "4",
            "--checkpoint.every", "null", *words, *TRAINERS[trainer], "--output", str(output),
            *more,
        ]  # fmt: skip

    def expected(self, trainer: str) -> Metrics:
        if trainer not in self.plain:
            words = self.words(trainer, self.recorded(trainer))
            self.plain[trainer] = tiny.run(trainer, words, str(self.folder / "cache"), True)
        return self.plain[trainer]

    def recorded(self, trainer: str) -> Path:
        """The folder of the run in plain torch."""
        return self.folder / trainer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("on-policy layouts")
    rows = rlhf_demo.rows("arithmetic", "train", "prompt")
    tiny.make_model(folder / "model", ends_answers=True)
    tiny.write_rows(folder / "train.jsonl", rows[:16])
    tiny.write_rows(folder / "eval.jsonl", rows[16:20])
    (folder / "reward.py").write_text(REWARD)
    return Runs(folder)


def answers_of(folder: Path, name: str) -> list[list[list[int]]]:
    """The token ids of the answers to each prompt in a file of rollouts."""
    with pa.memory_map(str(folder / "rollouts" / name)) as file:
        found: list[list[list[int]]] = pa.ipc.open_file(file).read_all()["tokens"].to_pylist()
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("source", ["embedded", "recorded"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_run_under_another_layout_follows_the_curve_of_one_rank(
    trainer: str, layout: str, source: str, runs: Runs, tmp_path: Path
) -> None:
    ranks, words = LAYOUTS[layout]
    expected, folder = runs.expected(trainer), tmp_path / "run"
    if source == "recorded":
        words = (*words, "--rollouts.replay", str(runs.recorded(trainer)))
    given = runs.words(trainer, folder, *words)
    metrics, *others = shared(ranks).run(tiny.run, trainer, given, str(runs.folder / "cache"))
    assert all(column(other, "loss") == column(metrics, "loss") for other in others)
    same_curve(metrics, expected)
    for name in ("reward", "entropy", "kl", "completions/mean_length"):
        assert column(metrics, name) == pytest.approx(column(expected, name), abs=1e-5), name
    # The policy has moved, and answers have ended at different lengths.
    assert column(metrics, "kl")[-1] > 1e-4
    for name in ROLLOUTS:
        assert answers_of(folder, name) == answers_of(runs.recorded(trainer), name)
    assert len({len(each) for group in answers_of(folder, "1.arrow") for each in group}) > 2
