"""Answers that the student or the teacher writes in place of the rows' own."""

from collections.abc import Sequence

import attrs
import numpy as np

from rlhf.engine import Engine
from rlhf.errors import RLHFError
from rlhf.trainer import Answer, Example, Run
from rlhf_plugin_kd.config import KDConfig


def with_new_answers(
    run: Run,
    config: KDConfig,
    examples: Sequence[Example],
    step: int,
    *,
    student: Engine,
    teacher: Engine,
) -> list[Example]:
    """The step's examples, a share of them with an answer by the student and a share with one by
    the teacher. Which ones, and what is drawn, follows from the seed, the step and the place in it:
    the same on all ranks, for any number of them, and after a resume. Collective."""
    seed = run.config.train.seed
    made = list(examples)
    writers = chosen(examples, [seed, step], config)
    for engine, places in ((student, writers["student"]), (teacher, writers["teacher"])):
        if not places:
            continue
        answers = run.sample(
            engine,
            [examples[place].prompt for place in places],
            seeds=[seed_of(seed, step, place) for place in places],
            max_new_tokens=config.max_new_tokens,
            temperature=config.sampling_temperature,
        )
        for place, tokens in zip(places, answers, strict=True):
            room = run.config.data.max_tokens - len(examples[place].prompt)
            made[place] = attrs.evolve(examples[place], answers=[Answer(tokens[:room])])
    return made


def check_room(run: Run, config: KDConfig) -> None:
    """Raise RLHFError where a new answer to the longest prompt could be larger than the budget."""
    if not config.writes:
        return
    train = run.examples[0]
    longest = int(train.prompt_lengths.argmax())
    prompt = int(train.prompt_lengths[longest])
    size = min(prompt + config.max_new_tokens, run.config.data.max_tokens)
    if size > run.config.batch.budget:
        raise RLHFError(
            f"{train.name(longest)}: with a new answer the example may have {size} tokens but "
            f"batch.tokens is {run.config.batch.budget}: set batch.tokens to at least {size}, or "
            "lower kd.max_new_tokens"
        )


def chosen(
    examples: Sequence[Example], seed: Sequence[int], config: KDConfig
) -> dict[str, list[int]]:
    """Return the places of the examples whose answers the student and the teacher write. An example
    without a prompt keeps its answer."""
    draws = np.random.Generator(np.random.PCG64([*seed, 0])).random(len(examples))
    writers: dict[str, list[int]] = {"student": [], "teacher": []}
    for place, (example, draw) in enumerate(zip(examples, draws, strict=True)):
        if not len(example.prompt):
            continue
        if draw < config.on_policy:
            writers["student"].append(place)
        elif draw < config.on_policy + config.teacher_answers:
            writers["teacher"].append(place)
    return writers


def seed_of(*numbers: int) -> int:
    """One seed of 63 bits from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
