"""A real vLLM, in an environment of its own that RLHF_VLLM names (docs/serve.md)."""

import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import rlhf_demo
from rlhf.trainer import Sample
from rlhf_devkit import tiny
from rlhf_rollout_vllm import answers, connection, engine, launch
from rlhf_rollout_vllm.launch import Server

ENVIRONMENT = os.environ.get("RLHF_VLLM")
PYTHON = Path(ENVIRONMENT or "") / "bin" / "python"


def words_of(tmp_path: Path, *more: str) -> list[str]:
    """Return the words of a run whose model vLLM can serve on a CPU."""
    model = tiny.make_model(tmp_path / "model")
    config = LlamaConfig.from_pretrained(model)
    # vLLM computes heads of these sizes on CPUs.
    config.hidden_size, config.num_attention_heads, config.head_dim = 64, 2, 32
    config.num_key_value_heads = 2
    LlamaForCausalLM(config).save_pretrained(model)
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def low(completions, completion_ids, **columns):\n"
        "    return [-float(sum(token > 100 for token in ids)) for ids in completion_ids]\n"
    )
    rows = rlhf_demo.rows("arithmetic", "train", "prompt")[:8]
    return [
        "--model", str(model), "--model.dtype", "fp32", "--data.workers", "0",
        "--data.train", str(tiny.write_rows(tmp_path / "train.jsonl", rows)),
        "--batch.size", "4", "--batch.tokens", "2048", "--data.max_tokens", "64",
        "--train.steps", "4", "--optim.lr", "1e-2", "--checkpoint.every", "null",
        "--grpo.max_new_tokens", "6", "--grpo.answers", "4", "--grpo.truncated", "count",
        "--grpo.rewards", f"{rewards}:low", "--output", str(tmp_path / "run"),
        "--rollouts.engine", "vllm", "--rollouts.vllm.python", str(PYTHON),
        "--rollouts.vllm.arguments", "[--enforce-eager]",
        "--rollouts.vllm.environment", "{VLLM_CPU_KVCACHE_SPACE: '1'}", *more,
    ]  # fmt: skip


@pytest.mark.matrix
@pytest.mark.skipif(ENVIRONMENT is None, reason="RLHF_VLLM names no environment with vLLM")
@pytest.mark.parametrize("more", [(), ("--lora", "4")], ids=["weights", "adapter"])
def test_a_started_vllm_has_the_weights_of_each_step(
    more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = tiny.run("grpo", words_of(tmp_path, *more), str(tmp_path / "cache"), True)
    assert len({line["grad_norm"] for line in curve}) == 4
    assert max(line["sampling/sampling_logp_difference/max"] for line in curve) < 1e-4
    assert "\nagreement  log-probabilities of " in capsys.readouterr().out


@pytest.mark.matrix
@pytest.mark.skipif(ENVIRONMENT is None, reason="RLHF_VLLM names no environment with vLLM")
def test_a_started_vllm_that_is_killed_is_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers: list[Server] = []
    draws: list[int] = []

    def start(*arguments: Any, **options: Any) -> Server:
        servers.append(launch.start(*arguments, **options))
        return servers[-1]

    def draw(*arguments: Any, **options: Any) -> list[Sample]:
        draws.append(servers[-1].process.pid)
        if len(draws) == 2:
            threading.Timer(0.01, servers[-1].process.kill).start()
        return answers.draw(*arguments, **options)

    with patch.object(connection, "start", start), patch.object(engine, "draw", draw):
        curve = tiny.run("grpo", words_of(tmp_path), str(tmp_path / "cache"), True)
    assert len(set(draws)) == 2
    assert len(draws) == 5
    assert max(line["sampling/sampling_logp_difference/max"] for line in curve) < 1e-4
    assert "; restart 1 of 3\n" in capsys.readouterr().out
    with pytest.raises(ProcessLookupError):
        os.killpg(draws[0], 0)
