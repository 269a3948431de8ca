"""Samples of an evaluation (`train.samples`): held-out rows with answers that the policy writes,
with scores of their own answers, or what an on-policy trainer shows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf.config.sections import Config
from rlhf.contract.checks import after, call_of, naming
from rlhf.data.batch import PackedBatch
from rlhf.data.examples import Examples
from rlhf.data.packing import prompt_inputs
from rlhf.errors import RLHFError
from rlhf.rollouts import find_engine
from rlhf.train.session import Session
from rlhf.trainer import Trainer

MAX_NEW_TOKENS = 256
"""Longest answer that is written."""
Shown = dict[str, Any]


def scores_answers(trainer: Trainer) -> bool:
    """Return whether the samples of a trainer are scores of the rows' own answers."""
    return type(trainer).score is not Trainer.score


def check_engine(trainer: Trainer, config: Config) -> None:
    """Raise RLHFError if evaluations show answers and nothing is installed that writes them."""
    if config.train.samples and not scores_answers(trainer):
        try:
            find_engine(config)
        except RLHFError as error:
            raise RLHFError(f"train.samples: {error}") from None


def rows_to_show(trainer: Trainer, held_out: Examples, number: int) -> list[int]:
    """Return the first held-out rows that can be shown. Raises RLHFError if there is none."""
    rows = np.arange(len(held_out))
    if not scores_answers(trainer):
        rows = np.flatnonzero(held_out.prompt_lengths)
    if number and not len(rows):
        raise RLHFError(
            f"train.samples {number} needs prompts to answer, but no row of data.eval has one; "
            "remove train.samples"
        )
    return rows[:number].tolist()


def take_samples(session: Session, *, step: int) -> list[Shown]:
    """Return the samples of the policy as it is after `step` steps. Collective."""
    order, trainer = session.eval_order, session.trainer
    if order is None or not session.config.train.samples:
        return []
    if type(trainer).samples is not Trainer.samples:
        return [dict(sample) for sample in trainer.samples(session.config.train.samples)]
    # A rank may write for long while others wait: only this phase allows it (places.SLOW).
    session.place.enter("rollout")
    held_out = order.examples
    rows = rows_to_show(trainer, held_out, session.config.train.samples)
    examples = [held_out[row] for row in rows]
    shown: list[Shown] = [
        {
            "row": held_out.name(row),
            "prompt": "\n".join([*held_out.images(row), _text(trainer, example.prompt)]),
            **({"images": pictures} if (pictures := held_out.thumbnails(row)) else {}),
        }
        for row, example in zip(rows, examples, strict=True)
    ]
    if scores_answers(trainer):
        with naming(call_of(trainer, "score"), after(step, held_out), rows):
            by_row = _scores(session, rows)
        for sample, row, example in zip(shown, rows, examples, strict=True):
            sample["answers"] = [_text(trainer, answer.tokens) for answer in example.answers]
            sample["scores"] = by_row[row]
        return shown
    written = session.sample(
        session.engine, [example.prompt for example in examples], seeds=[0] * len(examples),
        temperature=0.0, max_new_tokens=MAX_NEW_TOKENS, inputs=[*map(prompt_inputs, examples)],
    )  # fmt: skip
    for sample, answer in zip(shown, written, strict=True):
        sample["answers"] = [_text(trainer, answer.tokens)]
    return shown


def _text(trainer: Trainer, tokens: Sequence[int]) -> str:
    return str(trainer.tokenizer.decode(list(tokens), skip_special_tokens=True))


def _scores(session: Session, rows: Sequence[int]) -> dict[int, list[Any]]:
    """Return the scores of the answers of these held-out rows by row. Collective."""
    order = session.eval_order
    assert order is not None, "there are held-out rows"
    _, batches = order.step_of([order.examples[row] for row in rows], np.asarray(rows))
    own: dict[int, list[Any]] = {}
    with torch.no_grad():
        for batch in batches:
            scores = session.trainer.score(batch.to(session.engine.device))
            own |= zip(batch.rows, _by_example(scores.float().cpu(), batch), strict=True)
    return {row: scores for share in session.mesh.data.gather(own) for row, scores in share.items()}


def _by_example(scores: Tensor, batch: PackedBatch) -> list[list[Any]]:
    """Return the scores of each example's answers: a number each, or, of scores per token, a list
    of those that are not nan."""
    per_answer = scores.tolist()
    if len(scores) != batch.num_answers:
        known = ~scores.isnan()
        per_answer = [
            scores[known & (batch.example == example) & (batch.branch == branch)].tolist()
            for example, (_, answers) in enumerate(batch.spans)
            for branch in range(1, 1 + len(answers))
        ]
    rest = iter(per_answer)
    return [[next(rest) for _ in answers] for _, answers in batch.spans]
