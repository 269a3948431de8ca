"""Answers that the student or the teacher writes in place of the rows' own."""

import random
from collections.abc import Sequence

from rlhf.engine import Engine
from rlhf.errors import RLHFError
from rlhf.trainer import Answer, Example, Run, prompt_inputs, with_answers
from rlhf_plugin_kd.config import KDConfig
from rlhf_rollouts import room


def with_new_answers(
    run: Run,
    config: KDConfig,
    examples: Sequence[Example],
    seeds: Sequence[int],
    *,
    student: Engine,
    teacher: Engine,
) -> list[Example]:
    """Return the examples, a share of them with an answer by the student and a share with one by
    the teacher. Which ones, and what is drawn, follows from their seeds. Collective."""
    made = list(examples)
    writers = chosen(examples, seeds, config)
    for engine, places in ((student, writers["student"]), (teacher, writers["teacher"])):
        if not places:
            continue
        answers = run.sample(
            engine,
            [examples[place].prompt for place in places],
            seeds=[seeds[place] for place in places],
            max_new_tokens=config.max_new_tokens,
            temperature=config.sampling_temperature,
            inputs=[prompt_inputs(examples[place]) for place in places],
        )
        for place, answer in zip(places, answers, strict=True):
            own = examples[place]
            made[place] = with_answers(own, [Answer(answer.tokens)], own.values)
    return made


def check_room(run: Run, config: KDConfig) -> None:
    """Raise RLHFError where there is no prompt to answer, or a new answer to the longest one could
    be larger than the budget."""
    if not config.writes:
        return
    if not run.examples[0].prompt_lengths.any():
        raise RLHFError(
            "kd: no row of data.train has a prompt, so on_policy and teacher_answers would have no "
            "effect; give rows with prompts, or remove these settings"
        )
    room.check_room(run, config.max_new_tokens, "kd.max_new_tokens")


def chosen(
    examples: Sequence[Example], seeds: Sequence[int], config: KDConfig
) -> dict[str, list[int]]:
    """Return the places of the examples whose answers the student and the teacher write. An example
    without a prompt keeps its answer."""
    writers: dict[str, list[int]] = {"student": [], "teacher": []}
    for place, (example, seed) in enumerate(zip(examples, seeds, strict=True)):
        draw = random.Random(seed).random()
        if not len(example.prompt):
            continue
        if draw < config.on_policy:
            writers["student"].append(place)
        elif draw < config.on_policy + config.teacher_answers:
            writers["teacher"].append(place)
    return writers
