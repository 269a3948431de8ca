"""The estimate of memory against what accelerators measured, and the error when it is short."""

import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

import sft_runs
from odd_trainers import run_odd
from rlhf.data.example import Answer, Example
from rlhf.data.packing import pack
from rlhf.engine import GIB, Mesh
from rlhf.memory.estimate import Estimate, count_step
from rlhf.memory.rehearsal import META
from rlhf.model.role import ModelSpec
from rlhf.model.shape import empty_model, shape_of
from rlhf.readouts import token_logprobs
from rlhf.registry.gateway import load_hooks
from rlhf.request.reader import read_config
from rlhf.trainer import Loss, Term, Trainer
from rlhf_devkit.ranks import Ranks
from sft_runs import Inputs

AGAIN = ("--optim.states", "bf16", "--model.kernels", "compile", "--model.recompute", "full")
MEASURED = [
    (("--deepspeed.stage", "2"), 1, 18_432, 74.6),
    (("--deepspeed.stage", "3"), 1, 18_432, 77.9),
    (("--deepspeed.stage", "2"), 2, 18_432, 66.0),
    (("--deepspeed.stage", "3"), 2, 18_432, 67.8),
    (("--deepspeed.stage", "0", *AGAIN), 1, 19_584, 13.9),
]
"""Settings, ranks, tokens at once and GiB per rank: benchmarks/RESULTS.md, the 1.5B shape in bf16
on an H200."""


class Plain(Trainer):
    """Every token trained on, by one engine."""

    def example(self, row):
        raise AssertionError("not called")

    def setup(self, run):
        raise AssertionError("not called")

    def loss(self, batch):
        read = self.policy(batch, token_logprobs)
        return Loss((Term(-read["logprobs"].sum(), per="tokens"),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 1.5B shape of Qwen2.5 without weights."""
    folder = tmp_path_factory.mktemp("shape")
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, max_position_embeddings=32_768,
        tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("settings", "ranks", "tokens", "measured"), MEASURED)
def test_the_estimate_is_within_a_tenth_of_what_was_measured(
    settings: tuple[str, ...], ranks: int, tokens: int, measured: float, folder: Path
) -> None:
    words = ["--model", str(folder), "--data", "unread.jsonl", *settings]
    config = read_config("sft", overrides=words).config
    hooks, _ = load_hooks(config)
    model = empty_model(ModelSpec(config=config), Mesh())
    shape, mesh = shape_of(model), Mesh(world=ranks, device=torch.device("cuda"), memory=140 * GIB)
    plan = hooks.configure_zero(
        config=config, mesh=mesh, model_shape=shape, role="policy", trained=True, occupied=0
    )
    policy = dict(
        hooks.estimate_memory(config=config, plan=plan, model_shape=shape, mesh=mesh, trained=True)
    )
    trainer = Plain(None, None)
    trainer.policy = model
    model.train()
    batch = pack([Example([], [Answer([0] * tokens)])], [0]).to(META)
    updating, reducing = policy.pop("updating"), policy.pop("reducing", 0)
    policy.pop("host")
    counted = count_step(trainer, batch, [model])
    estimate = Estimate(
        states={"policy": policy}, updating=updating, step=counted, reducing=reducing,
        tokens=tokens, accumulates=False,
    )  # fmt: skip
    assert estimate.peak / GIB == pytest.approx(measured, rel=0.1)


def test_running_out_of_memory_is_one_line_that_says_what_to_change(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--deepspeed.stage", "1")
    (error,) = one.errors(run_odd, "GreedyTrainer", words, str(inputs.cache))
    line = next(text for text in error.splitlines() if "out of memory on" in text)
    assert "when allocating 2.00 GiB more; a step was estimated at 0." in line
    assert re.search(r" GiB: set \S+ \w+ \(about 0\.\d+ GiB\); `rlhf plan` lists what fits$", line)
