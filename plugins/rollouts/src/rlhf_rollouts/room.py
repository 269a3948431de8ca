"""The room that the answers of a run take: the most of it, and whether micro-batches have it."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf.trainer import Example, Examples, Run


def check_room(run: Run, max_new_tokens: int, setting: str) -> None:
    """Raise RLHFError if a new answer to the longest prompt could be larger than the budget;
    `setting` is what `max_new_tokens` is called."""
    for rows in run.examples:
        longest = int(rows.prompt_lengths.argmax())
        prompt = int(rows.prompt_lengths[longest])
        size = min(prompt + max_new_tokens, run.config.data.max_tokens)
        if size > run.config.batch.budget:
            raise RLHFError(
                f"{rows.name(longest)}: with a new answer the example may have {size} tokens but "
                f"batch.tokens is {run.config.batch.budget}: set batch.tokens to at least {size}, "
                f"or lower {setting}"
            )


def check_whole(run: Run, shape: Callable[[Examples, int], Example]) -> None:
    """Raise RLHFError if a group could be divided, of which each part would have the router loss of
    a whole one. `shape` is the trainer's `rollout_shape`."""
    budget, most = run.config.batch.budget, run.config.data.max_tokens
    size = max(num_tokens(shape(part, most)) for part in run.examples)
    if size > budget:
        raise SameOnAllRanks(
            f"a group may have {size} tokens but batch.tokens is {budget}, and the router loss "
            f"of a mixture needs whole groups; set batch.tokens to at least {size}, or "
            "model.router_loss to 0"
        )


def largest_group(
    prompts: NDArray[np.int64], *, answers: int, max_new_tokens: int, most: int
) -> tuple[int, list[int]]:
    """Return the tokens of a prompt and of each of its answers that are together as many as any of
    a rollout, and with a path as long as any, for prompts of these lengths and paths of up to
    `most` tokens."""
    room = np.clip(most - prompts, 1, max_new_tokens)
    largest = int((prompts + answers * room).argmax())
    prompt, size = int(prompts[largest]), int(room[largest])
    return prompt, [int((prompts + room).max()) - prompt, *[size] * (answers - 1)]


def num_tokens(example: Example) -> int:
    """Return the tokens of a prompt and all of its answers."""
    return len(example.prompt) + sum(len(answer.tokens) for answer in example.answers)
