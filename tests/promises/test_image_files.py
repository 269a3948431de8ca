"""Rows with images in whole runs: the numbers of plain transformers, the same curve in every
layout, exact resumes, and an export that has everything of the base."""

import base64
import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from rlhf.cli import main
from rlhf.errors import RLHFError
from rlhf.plugin import ModelConfig
from rlhf.request.reader import read_config
from rlhf_devkit import column
from rlhf_devkit.curves import weights, without_timings
from rlhf_devkit.ranks import Ranks
from rlhf_devkit.tiny import run
from rlhf_vision.demo import model_folder
from rlhf_vision.processor import load_processor

BASE = "demo:shapes"
PLACEHOLDER = "<|image_pad|>"
LAYOUTS = {
    1: ("--deepspeed.stage", "0", "--batch.tokens", "2048"),
    2: (
        "--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0",
        "--batch.tokens", "140",
    ),
}  # fmt: skip
"""By the number of ranks. Micro-batches of at most 140 tokens are often without an image."""


def question(folder: Path, number: int) -> dict[str, Any]:
    """A question about none, one or two pictures in files."""
    draw = random.Random(number)
    names = [f"{number}-{place}.png" for place in range(number % 3)]
    for name in names:
        size = (draw.choice([56, 84]), draw.choice([56, 112]))
        Image.new("RGB", size, draw.choice(["red", "green", "blue"])).save(folder / name)
    text = "<image>" * len(names) + "What is it?" * (1 + number % 2)
    return {"images": names, "prompt": [{"role": "user", "content": text}]}


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def row(trainer: str, asked: dict[str, Any], number: int) -> dict[str, Any]:
    """A row of a trainer's format."""
    right, wrong = said("a red circle" * (1 + number % 2)), said("two")
    if trainer == "dpo":
        return {**asked, "chosen": right, "rejected": wrong}
    if trainer == "kto":
        return {**asked, "completion": right if number % 2 else wrong, "label": number % 2 == 1}
    if trainer == "grpo":
        return {**asked, "answer": "a red circle"}
    return {"images": asked["images"], "messages": asked["prompt"] + right}


def words_of(trainer: str, folder: Path, *more: str) -> list[str]:
    """The command line of a short run on twelve rows, which are written."""
    folder.mkdir(exist_ok=True)
    rows = [row(trainer, question(folder, number), number) for number in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows))
    return [
        "--model", BASE, "--model.dtype", "fp32", "--data.train", str(folder / "rows.jsonl"),
        "--data.eval", "[]", "--data.workers", "0", "--batch.size", "4", "--optim.lr", "3e-4",
        "--train.epochs", "2", "--train.steps", "4", "--checkpoint.every", "2", *more,
    ]  # fmt: skip


def teacher_in(folder: Path) -> str:
    """Write the base with other weights."""
    torch.manual_seed(0)
    shutil.copytree(model_folder(), folder / "teacher")
    model = AutoModelForImageTextToText.from_pretrained(model_folder(), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    model.save_pretrained(folder / "teacher")
    return str(folder / "teacher")


@pytest.mark.parametrize(
    "trainer",
    ["dpo", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("sft", "kto", "kd"))],
)
def test_the_curve_does_not_depend_on_the_layout_and_resume_is_exact(
    trainer: str, tmp_path: Path, one: Ranks, two: Ranks
) -> None:
    curves, teacher = [], ("--kd.teacher", teacher_in(tmp_path)) if trainer == "kd" else ()
    for ranks in (one, two):
        output = tmp_path / str(ranks.world)
        words = words_of(
            trainer, tmp_path / "data", *LAYOUTS[ranks.world], "--output", str(output),
            "--model.train", "[language,projector,vision]", *teacher,
        )  # fmt: skip
        curves.append(ranks.run(run, trainer, words, str(tmp_path / "cache"))[0])
    trained = weights(output)
    resumed = two.run(
        run, trainer, [*words, "--resume", "step-000002"], str(tmp_path / "cache")
    )[0]  # fmt: skip
    assert without_timings(resumed) == without_timings(curves[1])
    assert weights(output) == trained
    on_one, on_two = curves
    assert column(on_two, "loss") == pytest.approx(column(on_one, "loss"), rel=1e-5, abs=1e-6)
    assert column(on_two, "grad_norm") == pytest.approx(
        column(on_one, "grad_norm"), rel=1e-4, abs=1e-4
    )
    assert column(on_one, "loss")[-1] != column(on_one, "loss")[0]


def test_answers_to_images_have_one_curve_resume_exactly_and_are_replayed(
    tmp_path: Path, one: Ranks, two: Ranks
) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def few(completion_ids, **columns):\n    return [-len({*ids}) for ids in completion_ids]\n"
    )
    own = {
        "rewards": f"{rewards}:few", "max_new_tokens": "6", "answers": "3", "batches": "2",
        "passes": "2", "truncated": "count", "filter": "none",
    }  # fmt: skip
    settings = [word for name, value in own.items() for word in (f"--grpo.{name}", value)]

    def words(name: str, ranks: Ranks, *more: str) -> list[str]:
        layout = LAYOUTS[ranks.world]
        output = ("--output", str(tmp_path / name))
        return words_of("grpo", tmp_path / "data", *settings, *layout, *output, *more)

    cache = str(tmp_path / "cache")
    recorded = two.run(run, "grpo", words("two", two), cache)[0]
    trained = weights(tmp_path / "two")
    # The checkpoint is taken between two steps of a rollout.
    resumed = two.run(run, "grpo", words("two", two, "--resume", "step-000002"), cache)[0]
    assert without_timings(resumed) == without_timings(recorded)
    assert weights(tmp_path / "two") == trained
    replay = ("--rollouts.replay", str(tmp_path / "two"))
    replayed = one.run(run, "grpo", words("one", one, *replay), cache)[0]
    for name in ("loss", "reward", "grad_norm"):
        ours, theirs = column(replayed, name), column(recorded, name)
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert len({*column(recorded, "loss")}) > 2
    file = tmp_path / "data" / "rows.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[4]["images"] = ["other.png"]
    with Image.open(tmp_path / "data" / "4-0.png") as image:
        Image.new("RGB", image.size, "white").save(tmp_path / "data" / "other.png")
    others = words("other", one, *replay)
    file.write_text("".join(json.dumps(item) + "\n" for item in rows))
    (error,) = one.errors(run, "grpo", others, cache)
    assert error == (
        f"rollouts.replay: {tmp_path / 'two' / 'rollouts' / '1.arrow'} answers another prompt than "
        f"{file} line 5 has now; replay a run with the same rows, tokenizer and chat template"
    )


def test_samples_of_rewards_have_small_pictures_of_their_rows(tmp_path: Path, one: Ranks) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def first(answer, images=None, **columns):\n    return [*range(len(answer))]\n"
    )
    words = words_of(
        "grpo", tmp_path / "data", "--grpo.rewards", f"{rewards}:first", "--train.steps", "1",
        "--grpo.max_new_tokens", "4", "--grpo.answers", "2", "--train.samples", "4",
        "--data.eval", str(tmp_path / "data" / "rows.jsonl"), "--output", str(tmp_path / "run"),
    )  # fmt: skip
    one.run(run, "grpo", words, str(tmp_path / "cache"))
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").open()]
    assert len(samples) == 4
    for sample in samples:
        number = int(sample["row"].rpartition(" ")[2]) - 1
        assert_pictured(sample, [f"{number}-{place}.png" for place in range(number % 3)], tmp_path)
    assert {len(sample.get("images", ())) for sample in samples} > {0}


def assert_pictured(sample: dict[str, Any], names: list[str], folder: Path) -> None:
    """Check that a sample has small pictures of these files, which have one color each."""
    urls = sample.get("images", [])
    assert len(urls) == len(names)
    for url, name in zip(urls, names, strict=True):
        content = base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))
        with Image.open(folder / "data" / name) as file, Image.open(io.BytesIO(content)) as small:
            assert small.size == file.size
            difference = np.asarray(small, int) - np.asarray(file, int)
            assert np.abs(difference).max() < 9


def plain_loss(folder: Path, model: Any, tokenizer: Any, processor: Any) -> float:
    """The mean loss of the answers, one row at a time, in plain transformers."""
    total, count = 0.0, 0
    for line in (folder / "rows.jsonl").read_text().splitlines():
        item = json.loads(line)
        asked, answer = item["messages"]
        text = asked["content"].replace("<image>", "")
        parts = [{"type": "image"}] * len(item["images"]) + [{"type": "text", "text": text}]
        talk = [{"role": "user", "content": parts}, answer]
        opened = [Image.open(folder / name) for name in item["images"]]
        prepared = dict(processor(opened, return_tensors="pt")) if opened else {}

        def ids(messages: list[Any], grids: Any, *, asks: bool) -> torch.Tensor:
            written = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=asks
            )
            pieces = written.split(PLACEHOLDER)
            sizes = [int(grid.prod()) // processor.merge_size**2 for grid in grids]
            joined = pieces[0] + "".join(
                PLACEHOLDER * size + piece for size, piece in zip(sizes, pieces[1:], strict=True)
            )
            encoded: torch.Tensor = tokenizer(joined, return_tensors="pt")["input_ids"]
            return encoded

        grids = prepared.get("image_grid_thw", [])
        prompt, whole = ids(talk[:1], grids, asks=True), ids(talk, grids, asks=False)
        kinds = (whole == model.config.image_token_id).int()
        with torch.no_grad():
            logits = model(input_ids=whole, mm_token_type_ids=kinds, **prepared).logits
        start = prompt.shape[1]
        end = start + whole[0, start:].tolist().index(tokenizer.eos_token_id) + 1
        logprobs = logits[0, start - 1 : end - 1].log_softmax(-1)
        total -= float(logprobs.gather(1, whole[0, start:end, None]).sum())
        count += end - start
    return total / count


def answer_to(number: int, data: Path, model: Any, folder: Path) -> str:
    """The most likely answer to a row's question, in plain transformers."""
    processor = load_processor(ModelConfig(path=str(folder)))
    item = json.loads((data / "rows.jsonl").read_text().splitlines()[number])
    text = item["messages"][0]["content"].replace("<image>", "")
    parts = [{"type": "image"}] * len(item["images"]) + [{"type": "text", "text": text}]
    asked = processor.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True
    )
    opened = [Image.open(data / name) for name in item["images"]] or None
    batch = processor(text=asked, images=opened, return_tensors="pt")
    written = model.generate(**batch, max_new_tokens=60, do_sample=False)
    new = written[0, batch["input_ids"].shape[1] :]
    return str(processor.tokenizer.decode(new, skip_special_tokens=True))


def test_the_loss_is_that_of_plain_transformers_and_the_export_opens_as_the_base(
    tmp_path: Path, one: Ranks
) -> None:
    output = tmp_path / "run"
    words = words_of(
        "sft", tmp_path / "data", "--batch.size", "12", "--train.steps", "1",
        "--data.eval", str(tmp_path / "data" / "rows.jsonl"), "--train.samples", "3",
    )  # fmt: skip
    metrics = one.run(run, "sft", [*words, "--output", str(output)], str(tmp_path / "cache"))[0]
    folder = output / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    base = AutoModelForImageTextToText.from_pretrained(model_folder(), dtype=torch.float32)
    expected = plain_loss(tmp_path / "data", base.eval(), tokenizer, processor)
    assert column(metrics, "loss")[0] == pytest.approx(expected, rel=1e-5)
    trained, opening = AutoModelForImageTextToText.from_pretrained(
        folder, output_loading_info=True
    )  # fmt: skip
    assert not opening["missing_keys"]
    assert not opening["unexpected_keys"]
    assert plain_loss(tmp_path / "data", trained.float().eval(), tokenizer, processor) < expected
    shown = [json.loads(line) for line in (output / "samples.jsonl").open()]
    assert [sample["answers"] for sample in shown] == [
        [answer_to(number, tmp_path / "data", trained, folder)] for number in range(3)
    ]
    assert shown[1]["prompt"] == (
        "image 1 (1-0.png): 56 x 56 pixels, 4 tokens\nWhat is it?What is it?"
    )
    for number, sample in enumerate(shown):
        assert_pictured(sample, [f"{number}-{place}.png" for place in range(number)], tmp_path)
    page = tmp_path / "report.html"
    assert main(["report", str(output), "--output", str(page)]) == 0
    assert page.read_text().count("<img ") == 3
    assert f'<img src="{shown[1]["images"][0]}" alt="image 1">' in page.read_text()
    # The tower is frozen by default.
    pairs = zip(trained.named_parameters(), base.parameters(), strict=True)
    changed = {name.split(".")[1] for (name, new), old in pairs if not torch.equal(new, old)}
    assert changed == {"language_model", "visual"}


def open_by_card(folder: Path) -> dict[str, Any]:
    """Run the Python code of a model's card; returns its names."""
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code.replace('"MODEL"', repr(str(folder))), names)
    return names


def test_the_cards_of_an_adapter_and_of_the_merged_model_open_model_and_processor(
    tmp_path: Path, one: Ranks
) -> None:
    output, merged = tmp_path / "run", tmp_path / "merged"
    words = words_of("sft", tmp_path / "data", "--train.steps", "1", "--lora.rank", "2")
    one.run(run, "sft", [*words, "--output", str(output)], str(tmp_path / "cache"))
    assert main(["merge", str(output), str(merged)]) == 0
    for folder in (output / "model", merged):
        text = (folder / "README.md").read_text()
        assert "\npipeline_tag: image-text-to-text\n" in text
        assert "--runner pooling" not in text
        names = open_by_card(folder)
        assert type(names["model"]).__name__ == "Qwen3VLForConditionalGeneration"
        assert names["processor"].image_token == PLACEHOLDER
    versions = json.loads((output / "versions.json").read_text())
    assert "rlhf-vision" in versions


def test_the_demo_of_a_reward_model_needs_a_model_of_another_family() -> None:
    with pytest.raises(RLHFError, match="the model of demo:shapes cannot be trained by rm, since"):
        read_config("rm", overrides=["--data", "demo:shapes"])
    request = read_config("rm", overrides=["--data", "demo:shapes", "--model", "other"])
    assert request.config.model.path == "other"
