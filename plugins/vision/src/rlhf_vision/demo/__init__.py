"""`demo:shapes`: questions about drawn images, and a small vision-language model that answers about
half of them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.errors import RLHFError
from rlhf.plugin import DemoPlugin

if TYPE_CHECKING:
    from rlhf_vision.demo.shapes import Question

Row = dict[str, Any]
SPLITS = ("eval", "train")
RATES = {"kto": 2e-4, "sft": 2e-3}
"""Learning rates by trainer; 1e-3 for others, at which KTO unlearns how answers read."""
CLASSIFIERS = ("prm", "rm")
"""Trainers of sequence and token classifiers, which transformers does not have for Qwen3-VL."""


def rows(split: str, format: str) -> list[Row]:
    """Return the rows of a split in one of FORMATS. Their images are data URLs of PNG files."""
    from rlhf_vision.demo.shapes import data_url, questions  # late: start-up time

    if split not in SPLITS:
        raise RLHFError(f"demo:shapes has no split {split!r}; available: {', '.join(SPLITS)}")
    if format not in FORMATS:
        available = ", ".join(FORMATS)
        raise RLHFError(f"demo:shapes has no {format} rows; available: {available}")
    make, draw = FORMATS[format], random.Random(f"{format} {split}")
    return [
        {"images": [data_url(scene) for scene in question.scenes], **make(question, draw)}
        for question in questions(split)
    ]


def model_folder() -> Path:
    """Return the folder of the base model: a Qwen3-VL of 0.6 M parameters, which `recipe` makes."""
    return Path(__file__).parent / "base"


def settings(trainer: str) -> dict[str, Any]:
    """Return what teaches the base model in about two minutes on 2 cores: `sft` takes it from 105
    to 184 right answers to the 200 held-out questions. Raises RLHFError for a trainer of
    CLASSIFIERS."""
    if trainer in CLASSIFIERS:
        raise RLHFError(
            f"the model of demo:shapes cannot be trained by {trainer}, since transformers has no "
            "classifier of its family, qwen3_vl; pass --model with a model of another family, such "
            "as qwen3_5"
        )
    # Without the second term, DPO unlearns how answers read.
    own = {"dpo": {"loss": ["sigmoid", {"name": "sft", "weight": 1.0}]}} if trainer == "dpo" else {}
    return own | {
        "model": {"path": "demo:shapes", "dtype": "fp32"},
        "data": {"eval": {"path": "demo:shapes", "split": "eval"}, "max_tokens": 256},
        "batch": {"size": 32, "tokens": 2048},
        "optim": {"lr": RATES.get(trainer, 1e-3), "warmup": 0.05},
        "train": {"epochs": 2, "log_every": 5, "eval_at_start": True},
        "checkpoint": {"every": None},
    }


def demonstration(question: "Question", draw: random.Random) -> Row:
    """Return a conversation of one question and its answer."""
    return {"messages": [asked(question), answered(question.answer)]}


def prompt(question: "Question", draw: random.Random) -> Row:
    """Return a question without an answer, and the answer in a column."""
    return {"prompt": [asked(question)], "answer": question.answer}


def preference(question: "Question", draw: random.Random) -> Row:
    """Return the right answer against a wrong one."""
    return {
        "prompt": [asked(question)],
        "chosen": [answered(question.answer)],
        "rejected": [answered(draw.choice(question.wrong))],
    }


def unpaired(question: "Question", draw: random.Random) -> Row:
    """Return an answer and whether it is right; half of them are."""
    right = draw.random() < 0.5
    shown = question.answer if right else draw.choice(question.wrong)
    return {"prompt": [asked(question)], "completion": [answered(shown)], "label": right}


FORMATS: dict[str, Callable[["Question", random.Random], Row]] = {
    "demonstration": demonstration,
    "preference": preference,
    "prompt": prompt,
    "unpaired": unpaired,
}
"""What makes rows of the formats of rlhf-rows."""


def asked(question: "Question") -> Row:
    images = [{"type": "image"} for _ in question.scenes]
    return {"role": "user", "content": [*images, {"type": "text", "text": question.text}]}


def answered(text: str) -> Row:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


plugin = DemoPlugin(rows=rows, model_folder=model_folder, settings=settings)
