"""The canary: texts whose log-probabilities show that the server has the weights that were sent."""

import math
from collections.abc import Sequence

from rlhf.errors import SameOnAllRanks
from rlhf_rollout_vllm.agreement import mean_difference

LENGTHS = (32, 16, 64, 128)
"""Most tokens of each text."""
EXACT, ROUNDED = 0.001, 0.05
"""Default limits of `canary` in fp32 and in other precisions."""


def canary_texts(
    prompts: Sequence[Sequence[int]], vocabulary: int, max_tokens: int
) -> list[list[int]]:
    """Return the ends of up to four prompts that differ, each with the last token of the
    vocabulary, which a server with another model may not have. The server adds one token."""
    distinct = [*dict.fromkeys(tuple(map(int, prompt)) for prompt in prompts)]
    chosen = distinct[:: max(1, len(distinct) // len(LENGTHS))]
    texts = []
    for prompt, length in zip(chosen, LENGTHS, strict=False):
        # Prompts begin alike. Some models need the first token, which begins every text for them.
        start = max(1, len(prompt) + 1 - min(length, max_tokens - 2))
        texts.append([prompt[0], *prompt[start:], vocabulary - 1])
    return texts


def check_canary(
    served: Sequence[Sequence[float]],
    own: Sequence[Sequence[float]],
    *,
    limit: float,
    number: int,
) -> None:
    """Raise RLHFError if, after transfer `number` of the weights, the log-probabilities of a text
    under the server are not those under the trainer."""
    for there, here in zip(served, own, strict=True):
        difference = mean_difference([there], [here])
        # A number that is not finite is none that agrees.
        if not difference <= limit:
            raise SameOnAllRanks(
                f"after transfer {number} of the weights the server does not have them: the mean "
                f"log-probability of a text is {_mean(there):.5g} there and {_mean(here):.5g} "
                f"here, which differ by {difference:.3g} per token, more than "
                f"rollouts.vllm.canary {limit:g}; look for the model's family and its dtype "
                "in docs/vllm.md"
            )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
