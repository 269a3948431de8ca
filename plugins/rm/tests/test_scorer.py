"""Exported reward models: the rewards of the run, in plain transformers and in a run after it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rlhf.errors import RLHFError
from rlhf_devkit import command, shared, tiny
from rlhf_plugin_rm.scorer import Scorer


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command line of a tiny run."""
    return tiny.short_run(tmp_path_factory.mktemp("rm"), "preference")


STAGES = {
    "stage 0": (1, ("--deepspeed.stage", "0")),
    "stage 3": (2, ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0")),
    "stage 3, LoRA": (
        2,
        ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0", "--lora.rank", "4"),
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_the_exported_model_gives_the_rewards_of_the_last_evaluation(
    name: str, words: list[str], tmp_path: Path
) -> None:
    world, more = STAGES[name]
    given = [*words, "--output", str(tmp_path / "run"), "--rm.normalise", "true", *more]
    metrics = shared(world).run(tiny.run, "rm", given, str(tmp_path / "cache"))[0][-1]
    held_out = read_rows(words[words.index("--data.eval") + 1])
    scorer = Scorer(tmp_path / "run" / "model")
    raw = torch.tensor(
        [
            scorer.rewards(row["prompt"], [row[name]], normalise=False)[0]
            for row in held_out
            for name in ("chosen", "rejected")
        ]
    )
    found = {
        "eval/mean_reward": raw.mean(),
        "eval/min_reward": raw.min(),
        "eval/max_reward": raw.max(),
        "eval/std_reward": raw.std(correction=0),
        "eval/accuracy": (raw[::2] > raw[1::2]).float().mean(),
        "eval/margin": (raw[::2] - raw[1::2]).mean(),
    }
    for metric, value in found.items():
        assert metrics[metric] == pytest.approx(value.item(), abs=1e-5), metric
    row = held_out[0]
    both = scorer.rewards(row["prompt"], [row["chosen"], row["rejected"]])
    expected = (raw[:2] - metrics["eval/mean_reward"]) / metrics["eval/std_reward"]
    assert both == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_checkpoint_is_exported_with_its_head_and_what_was_measured(
    words: list[str], tmp_path: Path
) -> None:
    given = [*words, "--output", str(tmp_path / "run"), "--checkpoint.every", "4"]
    shared(1).run(tiny.run, "rm", given, str(tmp_path / "cache"))
    shared(1).run(command, "export", str(tmp_path / "run"), str(tmp_path / "again"))
    one, other = Scorer(tmp_path / "run" / "model"), Scorer(tmp_path / "again")
    answers = ["The answer is 4.", "The answer is 5."]
    assert one.rewards("What is 2 + 2?", answers) == other.rewards("What is 2 + 2?", answers)
    assert other.config.reward_mean == pytest.approx(one.config.reward_mean)
    assert [one.precision, Scorer(tmp_path / "again", dtype="bf16").precision] == ["fp32", "bf16"]
    # What the machine of the run had need not be had by the one that exports.
    written = tmp_path / "run" / "config.yaml"
    config = yaml.safe_load(written.read_text())
    for settings in (
        {"kernels": "liger"},
        {"fp8": "tensorwise", "dtype": "bf16"},
    ):
        written.write_text(yaml.safe_dump(config | {"model": config["model"] | settings}))
        again = str(tmp_path / settings.popitem()[1])
        shared(1).run(command, "export", str(tmp_path / "run"), again)
    there = Scorer(tmp_path / "liger").rewards("What is 2 + 2?", answers)
    assert there == one.rewards("What is 2 + 2?", answers)
    assert (tmp_path / "bf16" / "model.safetensors").is_file()


def read_rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def conversations(words: list[str]) -> list[list[dict[str, str]]]:
    """Every held-out answer after its prompt."""
    held_out = read_rows(words[words.index("--data.eval") + 1])
    return [row["prompt"] + row[name] for row in held_out for name in ("chosen", "rejected")]


def without_held_out_rows(words: list[str]) -> list[str]:
    place = words.index("--data.eval")
    return words[:place] + words[place + 2 :]


def started_from(model: list[str], words: list[str], *more: str) -> list[str]:
    """The command line with other words for the model."""
    return [*model, *words[2:], *more]


LINES = (
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""A template that, like ChatML, writes a line break behind each turn's end."""
OPEN_ENDED = LINES.replace("'>' + ", "'> ' + ").replace("'<assistant>'", "'<assistant> '")
"""The same, but its generation prompt ends within a token of what it renders."""


@pytest.mark.parametrize("source", [LINES, OPEN_ENDED], ids=["lines", "open"])
def test_a_reward_is_read_where_the_rendering_ends(
    source: str, words: list[str], tmp_path: Path
) -> None:
    folder, template = tmp_path / "run" / "model", tmp_path / "template.jinja"
    template.write_text(source)
    given = [*words, "--output", str(folder.parent), "--data.chat_template", str(template)]
    metrics = shared(1).run(tiny.run, "rm", given, str(tmp_path / "cache"))[0][-1]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in conversations(words)]
    assert all(text.endswith(tokenizer.eos_token + "\n") for text in texts)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    with torch.no_grad():
        plain = torch.tensor([float(model(input_ids=torch.tensor([row])).logits) for row in ids])
    assert metrics["eval/mean_reward"] == pytest.approx(plain.mean().item(), abs=1e-5)
    assert metrics["eval/max_reward"] == pytest.approx(plain.max().item(), abs=1e-5)
    prompt, answer = conversations(words)[0][:-1], conversations(words)[0][-1:]
    assert Scorer(folder).rewards(prompt, [answer], normalise=False) == [
        pytest.approx(plain[0].item(), abs=1e-5)
    ]


@pytest.mark.parametrize("side", ["left", "right"])
def test_plain_transformers_scores_rendered_conversations_in_one_padded_batch(
    side: str, words: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run" / "model"
    given = [*words, "--output", str(folder.parent)]
    metrics = shared(1).run(tiny.run, "rm", given, str(tmp_path / "cache"))[0][-1]
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert (model.config.num_labels, model.config.id2label) == (1, {0: "reward"})
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    inputs = tokenizer.apply_chat_template(
        conversations(words), tokenize=True, padding=True, return_dict=True, return_tensors="pt"
    )
    assert not inputs["attention_mask"].all()
    with torch.no_grad():
        rewards = model(**inputs).logits.squeeze(-1)
    assert rewards.mean().item() == pytest.approx(metrics["eval/mean_reward"], abs=1e-5)
    assert rewards.min().item() == pytest.approx(metrics["eval/min_reward"], abs=1e-5)
    assert rewards.max().item() == pytest.approx(metrics["eval/max_reward"], abs=1e-5)


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapter"])
def test_training_continues_from_the_rewards_of_an_exported_model(
    lora: bool, words: list[str], tmp_path: Path
) -> None:
    folder, cache = tmp_path / "first" / "model", str(tmp_path / "cache")
    adapted = ["--lora.rank", "4"] if lora else []
    first = [*words, *adapted, "--output", str(folder.parent)]
    before = shared(1).run(tiny.run, "rm", first, cache)[0][-1]
    model = [*words[:2], "--model.adapter", str(folder)] if lora else ["--model", str(folder)]
    more = ["--train.eval_at_start", "true", "--output", str(tmp_path / "second")]
    metrics = shared(1).run(tiny.run, "rm", started_from(model, words, *more), cache)[0]
    at_start = next(line for line in metrics if "eval/loss" in line)
    assert at_start["step"] == 0
    for name, value in before.items():
        if name.startswith("eval/"):
            assert at_start[name] == pytest.approx(value, abs=1e-5), name
    assert metrics[-1]["eval/mean_reward"] != pytest.approx(before["eval/mean_reward"], abs=1e-3)


def test_a_run_without_held_out_rows_forgets_what_was_measured_before_it(
    words: list[str], tmp_path: Path
) -> None:
    folder, cache = tmp_path / "first" / "model", str(tmp_path / "cache")
    first = [*words, "--rm.normalise", "true", "--output", str(folder.parent)]
    shared(1).run(tiny.run, "rm", first, cache)
    assert AutoConfig.from_pretrained(folder).reward_normalise
    more = ["--output", str(tmp_path / "second")]
    again = without_held_out_rows(started_from(["--model", str(folder)], words, *more))
    shared(1).run(tiny.run, "rm", again, cache)
    scorer = Scorer(tmp_path / "second" / "model")
    scorer.rewards("What is 2 + 2?", ["The answer is 4."])
    with pytest.raises(RLHFError) as caught:
        scorer.rewards("What is 2 + 2?", ["The answer is 4."], normalise=True)
    assert str(caught.value) == (
        f"{tmp_path / 'second' / 'model'} has no reward_mean in its config.json, because its run "
        "had no held-out rows; set data.eval in the run, or pass normalise=False"
    )


def test_a_merged_adapter_gives_the_rewards_of_the_adapter(
    words: list[str], tmp_path: Path
) -> None:
    given = [*words, "--lora.rank", "4", "--rm.normalise", "true"]
    given += ["--output", str(tmp_path / "run")]
    shared(1).run(tiny.run, "rm", given, str(tmp_path / "cache"))
    command("merge", str(tmp_path / "run"), str(tmp_path / "merged"))
    one, other = Scorer(tmp_path / "run" / "model"), Scorer(tmp_path / "merged")
    answers = ["The answer is 4.", "The answer is 5."]
    expected = one.rewards("What is 2 + 2?", answers)
    assert other.rewards("What is 2 + 2?", answers) == pytest.approx(expected, abs=1e-5)


def test_a_folder_without_rewards_is_refused(words: list[str], tmp_path: Path) -> None:
    language_model = words[words.index("--model") + 1]
    with pytest.raises(RLHFError) as error:
        Scorer(language_model)
    assert str(error.value) == (
        f"{language_model} has no score.weight, so it is not a LlamaForSequenceClassification; "
        "pass the model/ folder of a run that trained one"
    )
    with pytest.raises(RLHFError) as error:
        Scorer(tmp_path / "gone")
    assert str(error.value).startswith(f"cannot load {tmp_path}/gone (")
    assert str(error.value).endswith("); pass the model/ folder of a run")
