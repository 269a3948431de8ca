"""A reward model in a run scores texts as plain transformers does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

import rlhf_demo
from rlhf.errors import RLHFError
from rlhf_devkit import make_model, run, write_rows
from rlhf_rollouts.reward_models import example_of, mean_and_deviation
from rlhf_rollouts.rewards import RewardSpec

TRAINER = f"{Path(__file__).with_name('judged_trainer.py')}:Judged"


def test_a_reward_model_scores_as_plain_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "rm", seed=1)
    torch.manual_seed(2)
    model = LlamaForSequenceClassification.from_pretrained(folder, num_labels=1)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"reward_normalise": True, "reward_mean": 0.5, "reward_std": 0.25}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("REWARD_MODEL", str(folder))
    monkeypatch.setenv("SCORES", str(tmp_path / "scores.npz"))
    rows = write_rows(
        tmp_path / "rows.jsonl", rlhf_demo.rows("arithmetic", "train", "demonstration")[:4]
    )
    words = [
        "--model", str(make_model(tmp_path / "policy")), "--model.dtype", "fp32", "--data.train",
        str(rows), "--batch.size", "4", "--batch.tokens", "512", "--train.steps", "1",
        "--output", str(tmp_path / "run"),
    ]  # fmt: skip
    run(TRAINER, words, str(tmp_path / "cache"), True)
    with np.load(tmp_path / "scores.npz") as scored:
        assert [*scored] == ["prompts", "completions", "model", "of_chats", "of_none"]
        prompts, completions, ours, of_chats, of_none = scored.values()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = tokenizer(f"{prompt}{completion}{tokenizer.eos_token}", return_tensors="pt").input_ids
        with torch.no_grad():
            theirs.append(model.score(model.model(ids).last_hidden_state[0, -1]).item())
    np.testing.assert_allclose(ours, (np.array(theirs) - 0.5) / 0.25, atol=1e-5)
    np.testing.assert_allclose(of_chats, [ours[0], np.nan, ours[2]], atol=1e-6)
    assert np.isnan(of_none).all()


CHAT = (
    "{% if tools %}{{ tools[0].name }}: {% endif %}"
    "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
)


@pytest.mark.parametrize("tools", [[{"name": "add"}], '[{"name": "add"}]', None, []])
def test_a_reward_model_reads_the_tools_of_a_conversation(tools: Any, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path / "rm"))
    question, answer = ({"role": role, "content": "2 + 3"} for role in ("user", "assistant"))
    tokenizer.chat_template = CHAT
    example = example_of(tokenizer, [question], [[answer]], tools, name="judge")
    assert tokenizer.decode(example.prompt).startswith("add: 2 + 3" if tools else "2 + 3")
    if not tools:
        return
    tokenizer.chat_template = CHAT.replace("tools", "no_tools")
    with pytest.raises(RLHFError) as raised:
        example_of(tokenizer, [question], [[answer]], tools, name="judge")
    assert str(raised.value) == (
        "reward 'judge': the chat template ignores `tools`; remove them or set data.chat_template"
    )


def test_rewards_are_normalised_only_if_the_run_of_the_model_wanted_it() -> None:
    spec = RewardSpec(model="runs/rm")
    assert mean_and_deviation(LlamaConfig(reward_mean=0.5), spec) == (0, 1)
    with pytest.raises(RLHFError) as raised:
        mean_and_deviation(LlamaConfig(reward_normalise=True, reward_mean=None), spec)
    assert str(raised.value) == (
        "reward 'model': runs/rm has no reward_mean in its config.json, because its run had no "
        "held-out rows; set data.eval in that run"
    )
