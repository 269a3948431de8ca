"""Trees packed into one row of tokens without padding."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.data.example import Example

FILLER_TOKENS = 2
PER_EXAMPLE, PER_ANSWER, PER_TOKEN = "example", "answer", "token"

Spans = tuple[tuple[int, tuple[int, ...]], ...]


@frozen
class Segments:
    """The segments of a row, S in all: each example's prompt, then its answers."""

    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    """Index in the row of the first token [S]."""
    example: NDArray[np.int64]
    branch: NDArray[np.int64]
    offset: NDArray[np.int64]
    """Position of the first token in its path [S]."""
    before: NDArray[np.int64]
    """Index in the row of the token before the first one in its path [S], -1 without one."""


def pack(
    examples: Sequence[Example], rows: Sequence[int], *, round_to: int = 1, at_most: int = 0
) -> PackedBatch:
    """Return the examples with the numbers `rows` as one row; a filler if `rows` is empty.

    T is rounded up to a multiple of `round_to`, but not beyond `at_most` if the tokens fit into it.
    """
    kinds = value_kinds(examples)
    if not len(rows):
        return filler(kinds, round_to=round_to)
    chosen = [examples[int(row)] for row in rows]
    spans = tuple((len(e.prompt), tuple(len(a.tokens) for a in e.answers)) for e in chosen)
    segments = _segments(spans)
    num_tokens = int(segments.lengths.sum())
    size = max(num_tokens, min(-(-num_tokens // round_to) * round_to, at_most or 1 << 62))
    parts = [part for e in chosen for part in (e.prompt, *(a.tokens for a in e.answers))]
    tokens = _padded(np.concatenate([np.asarray(part, np.int64) for part in parts]), size, 0)
    arrays = _per_token(segments, size) | _predictions(chosen, segments, tokens)
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        rows=tuple(int(row) for row in rows),
        spans=spans,
        values=_values(chosen, kinds, segments, size),
        inputs=_inputs(chosen),
        **tensors,
    )


def filler(kinds: Mapping[str, str] | None = None, *, round_to: int = 1) -> PackedBatch:
    """Return a row without examples, which keeps a rank in step with the others."""
    size = max(FILLER_TOKENS, round_to)
    values = {
        name: torch.full((size if kind == PER_TOKEN else 0,), torch.nan)
        for name, kind in (kinds or {}).items()
    }
    return attrs.evolve(blank_batch(torch.zeros(size, dtype=torch.int64)), values=values)


def blank_batch(tokens: Tensor, spans: Spans = ()) -> PackedBatch:
    """Return `tokens` [T] laid out by `spans`, as `PackedBatch.spans`, with nothing to predict."""
    arrays = _per_token(_segments(spans), len(tokens))
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    names = ("predict_from", "predict_at", "predict", "answer", "answer_example", "answer_end")
    nothing: dict[str, Any] = dict.fromkeys(names, torch.empty(0, dtype=torch.int64))
    return PackedBatch(tokens=tokens, spans=spans, **tensors, **nothing).to(tokens.device)


def value_kinds(examples: Sequence[Example]) -> Mapping[str, str]:
    """Return what each value is per: `example`, `answer` or `token`."""
    kinds = getattr(examples, "value_kinds", None)
    if kinds is not None:
        return dict(kinds)
    return {name: kind_of(value) for name, value in examples[0].values.items()} if examples else {}


def kind_of(value: Any) -> str:
    """Return what a value of an example is per, from its nesting."""
    if not hasattr(value, "__len__"):
        return PER_EXAMPLE
    return PER_TOKEN if len(value) and hasattr(value[0], "__len__") else PER_ANSWER


def num_predictions(example: Example) -> list[int]:
    """Return for each answer the number of trained tokens that follow another token."""
    counts = []
    for answer in example.answers:
        mask = answer.trained
        count = len(answer.tokens) if mask is None else int(sum(mask))
        first = not len(example.prompt) and len(answer.tokens) and (mask is None or mask[0])
        counts.append(count - bool(first))
    return counts


def divided(example: Example, tokens: int) -> list[Example]:
    """Return trees of at most `tokens` tokens, or of one answer, that have the answers of
    `example`. An example with values of its own is not divided."""
    kinds = value_kinds([example])
    room = tokens - len(example.prompt)
    starts, size = [0], 0
    for place, answer in enumerate(example.answers):
        size += len(answer.tokens)
        if size > room and place > starts[-1]:
            starts.append(place)
            size = len(answer.tokens)
    if len(starts) == 1 or PER_EXAMPLE in kinds.values():
        return [example]
    parts = [slice(*ends) for ends in pairwise([*starts, len(example.answers)])]
    return [
        attrs.evolve(
            example, answers=example.answers[part],
            values={name: value[part] for name, value in example.values.items()},
        ) for part in parts
    ]  # fmt: skip


def num_labels(example: Example) -> int:
    """Return the number of values per token that are not nan."""
    per_token = [value for value in example.values.values() if kind_of(value) == PER_TOKEN]
    return sum(
        int((~np.isnan(np.asarray(row, float))).sum()) for value in per_token for row in value
    )


def _segments(spans: Spans) -> Segments:
    lengths = np.array([n for prompt, answers in spans for n in (prompt, *answers)], np.int64)
    ends = np.cumsum(lengths)
    counts = np.array([len(answers) + 1 for _, answers in spans], np.int64)
    firsts = np.cumsum(counts) - counts
    example = np.repeat(np.arange(len(spans)), counts)
    branch = np.arange(len(lengths)) - firsts[example]
    prompt = lengths[firsts][example]
    prompt_end = ends[firsts][example] - 1
    on_answer = branch > 0
    return Segments(
        lengths=lengths,
        starts=ends - lengths,
        example=example,
        branch=branch,
        offset=np.where(on_answer, prompt, 0),
        before=np.where(on_answer & (prompt > 0), prompt_end, -1),
    )


def _per_token(segments: Segments, size: int) -> dict[str, NDArray[np.int64]]:
    row = np.arange(int(segments.lengths.sum()))
    shift = np.repeat(segments.offset - segments.starts, segments.lengths)
    return {
        "positions": _padded(row + shift, size, 0),
        "example": _padded(np.repeat(segments.example, segments.lengths), size, -1),
        "branch": _padded(np.repeat(segments.branch, segments.lengths), size, 0),
    }


def _predictions(
    chosen: Sequence[Example], segments: Segments, tokens: NDArray[np.int64]
) -> dict[str, NDArray[np.int64]]:
    """Return the index tensors of the loss."""
    on_answer = segments.branch > 0
    starts, lengths = segments.starts[on_answer], segments.lengths[on_answer]
    assert bool((lengths > 0).all()), "an answer without tokens"
    trained = np.zeros(int(segments.lengths.sum()), bool)
    masks = (answer.trained for example in chosen for answer in example.answers)
    for start, length, mask in zip(starts, lengths, masks, strict=True):
        trained[start : start + length] = True if mask is None else mask
    # Position t predicts token t + 1; an answer's first token is predicted from its prompt's last.
    previous = np.arange(-1, len(trained) - 1)
    filled = segments.lengths > 0
    previous[segments.starts[filled]] = segments.before[filled]
    at = np.flatnonzero(trained & (previous >= 0))
    return {
        "predict_from": previous[at],
        "predict_at": at,
        "predict": tokens[at],
        "answer": np.repeat(np.cumsum(on_answer) - 1, segments.lengths)[at],
        "answer_example": segments.example[on_answer],
        "answer_end": starts + lengths - 1,
    }


def _values(
    chosen: Sequence[Example], kinds: Mapping[str, str], segments: Segments, size: int
) -> dict[str, Tensor]:
    out = {}
    for name, kind in kinds.items():
        listed = [example.values[name] for example in chosen]
        if kind == PER_EXAMPLE:
            flat = np.array(listed, np.float32)
        elif kind == PER_ANSWER:
            flat = np.concatenate([np.asarray(value, np.float32) for value in listed])
        else:
            rows = [np.asarray(row, np.float32) for value in listed for row in value]
            flat = np.full((size, *rows[0].shape[1:]), np.nan, np.float32)
            on_answer = np.repeat(segments.branch > 0, segments.lengths)
            flat[: len(on_answer)][on_answer] = np.concatenate(rows)
        out[name] = torch.from_numpy(flat)
    return out


def _inputs(chosen: Sequence[Example]) -> dict[str, Any]:
    """Return the keyword arguments of the model, concatenated along the first dimension."""
    return {
        name: torch.cat([torch.as_tensor(example.inputs[name]) for example in chosen])
        for name in chosen[0].inputs
    }


def _padded(values: NDArray[np.int64], size: int, fill: int) -> NDArray[np.int64]:
    if len(values) == size:
        return values
    return np.concatenate([values, np.full(size - len(values), fill, np.int64)])
