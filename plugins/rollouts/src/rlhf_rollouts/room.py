"""Whether the answers of a run fit into its micro-batches, which trainers check at its start."""

from rlhf.errors import RLHFError
from rlhf.trainer import Run


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
