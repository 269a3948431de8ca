"""Runs of a trainer on small models that read images."""

from pathlib import Path

import attrs
import numpy as np
from image_families import example_with_images, image_model
from transformers import AutoTokenizer

import rlhf_demo
from rlhf_devkit.tiny import write_rows

TRAINER = """
from rlhf.readouts import token_logprobs
from rlhf.trainer import Answer, Example, Loss, Term, Trainer


class Pictured(Trainer):
    row_format = None

    def example(self, row):
        answers = [Answer(tokens) for tokens in row["answers"]]
        return Example(row["prompt"], answers, inputs=row["inputs"])

    def setup(self, run):
        self.policy = run.load("policy")
        self.reference = run.reference("cache")

    def loss(self, batch):
        logprobs = self.policy(batch, token_logprobs)["logprobs"]
        moved = logprobs - self.reference.token_logprobs(batch)
        return Loss((Term((moved.square() - logprobs).sum(), per="tokens"),))
"""


def as_row(example: object) -> dict[str, object]:
    def plain(value: object) -> object:
        return value.tolist() if isinstance(value, np.ndarray) else value

    row = attrs.asdict(example)  # type: ignore[arg-type]
    answers = [answer["tokens"] for answer in row["answers"]]
    inputs = {name: plain(value) for name, value in row["inputs"].items()}
    return {"prompt": row["prompt"], "answers": answers, "inputs": inputs}


def write_run(name: str, folder: Path) -> list[str]:
    """Write a model and rows, of which every fourth has images, and return the command line of a
    run on them."""
    causal, draw = image_model(name), np.random.default_rng(0)
    causal.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(rlhf_demo.base_model_folder()).save_pretrained(folder / "model")
    examples = [
        example_with_images(name, causal, draw, number % 4 == 0, 0, 0, lengths=(12, 6, 5))
        for number in range(12)
    ]
    rows = write_rows(folder / "rows.jsonl", [as_row(example) for example in examples])
    return [
        "--model.path", str(folder / "model"), "--model.dtype", "fp32", "--data.train", str(rows),
        "--data.eval", str(rows), "--data.workers", "0", "--batch.size", "4",
        "--optim.lr", "1e-3", "--train.steps", "3", "--train.eval_every", "3",
    ]  # fmt: skip
