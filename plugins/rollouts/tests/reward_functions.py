"""Reward functions as users of TRL write them, and some that fail."""

import asyncio
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Numbers = list[float | None]


@dataclass
class Weights:
    """A class whose module must be found while a file is imported."""

    length: "float" = 1.0


def length(completions: list[str], **kwargs: Any) -> list[float]:
    """The form in most of TRL's examples."""
    return [Weights().length * len(completion) for completion in completions]


def whole(
    prompts: list[str],
    completions: list[str],
    completion_ids: list[list[int]],
    answer: list[str],
    trainer_state: Any,
    log_extra: Any,
    log_metric: Any,
    **kwargs: Any,
) -> Numbers:
    """Takes all that TRL passes, and one column. What it cannot score is None."""
    assert "prompt" not in kwargs
    log_extra("last", [ids[-1] for ids in completion_ids])
    log_extra("right", np.array([each == "5" for each in answer]))
    log_metric("calls", 1)
    log_metric("size", np.float32(len(prompts)))
    step = trainer_state.global_step
    return [None if it == "?" else np.float64(step + (it in completions)) for it in answer]


def few(completions: list[Any]) -> Any:
    """Names one argument only, and returns an array."""
    return np.arange(len(completions))


def of_messages(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    """Gets messages where the row was a conversation."""
    pairs = zip(prompts, completions, strict=True)
    return [len(prompt[0]["content"]) + len(answer[0]["content"]) for prompt, answer in pairs]


async def judge(completions: list[str], **kwargs: Any) -> list[float]:
    """Waits, as for a server."""
    await asyncio.sleep(0.3)
    return [float(len(completion)) for completion in completions]


async def second_judge(completions: list[str], **kwargs: Any) -> list[float]:
    return await judge(completions)


class Judge:
    """An object that is called."""

    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(0.0)
        return [1.0] * len(completions)


an_object = Judge()
not_a_function = 3


def scaled(completions: list[str], *, factor: float, **kwargs: Any) -> list[float]:
    """Has an option."""
    return [factor * len(completion) for completion in completions]


def no_texts(answer: list[str]) -> list[float]:
    return [1.0 for _ in answer]


def inverse(completions: list[str], **kwargs: Any) -> list[float]:
    """Fails for an empty answer."""
    return [1 / len(completion) for completion in completions]


def leaves(completions: list[str], **kwargs: Any) -> list[float]:
    raise SystemExit(3)


def dies(completions: list[str], **kwargs: Any) -> list[float]:
    os._exit(7)


def dies_with_a_child(completions: list[str], number: list[str], **kwargs: Any) -> list[float]:
    """Leaves the number of a process of its own in a file."""
    child = subprocess.Popen(["sleep", "60"])
    Path(number[0]).write_text(str(child.pid))
    os._exit(7)


def no_more_than_one(completions: list[str]) -> list[float]:
    if len(completions) > 1:
        raise ValueError("too many")
    return [1.0]


def one_short(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0] * (len(completions) - 1)


def gives(completions: list[str], **kwargs: Any) -> Any:
    """Returns the column `value` as it is."""
    return kwargs["value"]


def logs_too_few(completions: list[str], log_extra: Any, **kwargs: Any) -> list[float]:
    log_extra("column", [1])
    return [0.0] * len(completions)


def hangs(completions: list[str], **kwargs: Any) -> list[float]:
    """Hangs at the answers that say so."""
    if "hang" in completions:
        time.sleep(60)
    return [1.0] * len(completions)


async def hangs_too(completions: list[str], **kwargs: Any) -> list[float]:
    if "hang" in completions:
        await asyncio.sleep(60)
    return [1.0] * len(completions)


def process(completions: list[str], **kwargs: Any) -> list[float]:
    """The number of the process."""
    time.sleep(0.05)
    return [float(os.getpid()) for _ in completions]
