"""Log-probabilities under the trainer of texts that the server has seen or drawn."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain

import torch

from rlhf.engine import Engine, Mesh
from rlhf.errors import SameOnAllRanks
from rlhf.readouts import token_logprobs
from rlhf.rollouts import groups_by_length, pack
from rlhf.trainer import Answer, Example

Text = tuple[Sequence[int], Sequence[int]]
"""The token ids of a prompt and of what follows it."""


def own_logprobs(
    engine: Engine, texts: Sequence[Text], *, mesh: Mesh, budget: int, temperature: float = 1.0
) -> list[list[float]]:
    """Return the log-probabilities of the tokens that follow each prompt, in micro-batches of at
    most `budget` tokens or one text. Collective."""
    examples = [Example(list(prompt), [Answer(list(rest))]) for prompt, rest in texts]
    groups = groups_by_length([len(prompt) + len(rest) for prompt, rest in texts], budget)
    readout = partial(token_logprobs, temperature=temperature or 1.0)
    ranks, found = mesh.data, dict[int, list[float]]()
    with _evaluating(engine), torch.no_grad():
        for first in range(0, len(groups), ranks.size):
            # Every forward may gather weights: a rank without a group repeats the last one.
            group = groups[min(first + ranks.rank, len(groups) - 1)]
            batch = pack(examples, sorted(group)).to(engine.device)
            values = iter(engine(batch, readout)["logprobs"].tolist())
            for place in sorted(group):
                found[place] = [next(values) for _ in texts[place][1]]
    whole = dict(chain.from_iterable(part.items() for part in ranks.gather(found)))
    return [whole[place] for place in range(len(texts))]


def mean_difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Return the mean absolute difference between numbers."""
    pairs = [*zip(chain.from_iterable(one), chain.from_iterable(other), strict=True)]
    return sum(abs(a - b) for a, b in pairs) / max(1, len(pairs))


def check_agreement(
    served: Sequence[Sequence[float]], own: Sequence[Sequence[float]], *, limit: float
) -> str:
    """Return a line that says how far the server's log-probabilities of a rollout are from the
    trainer's. Raises RLHFError if they are too far."""
    difference, count = mean_difference(served, own), sum(map(len, served))
    if not difference <= limit:
        raise SameOnAllRanks(
            f"the server's log-probabilities of the {count:,} tokens of its first "
            f"rollout differ from the trainer's by {difference:.3g} on average, more than "
            f"rollouts.vllm.agreement {limit:g}; start it with --logprobs-mode "
            "processed_logprobs and the dtype of the run, or raise the limit"
        )
    return (
        f"agreement  log-probabilities of {count:,} tokens under vLLM and the trainer differ "
        f"by {difference:.2g} on average"
    )


@contextmanager
def _evaluating(engine: Engine) -> Iterator[None]:
    """Switch dropout off."""
    trained = engine.module.training
    engine.eval()
    try:
        yield
    finally:
        if trained:
            engine.train()
