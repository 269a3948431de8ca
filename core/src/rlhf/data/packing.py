"""Trees packed into one row of tokens without padding."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from rlhf.data.batch import TOKEN_INPUTS, PackedBatch
from rlhf.data.example import Answer, Example, num_tokens

FILLER_TOKENS = 2
SEGMENT_ROWS = "segment_rows"
"""An input that the model does not get: how many rows of each other input, by name, belong to the
prompt and to each answer [1 + answers, inputs]. Without it all belong to the prompt."""
PER_EXAMPLE, PER_ANSWER, PER_TOKEN = "example", "answer", "token"
BLANKS: WeakKeyDictionary[Any, Example | None] = WeakKeyDictionary()
"""The blank of each data set in memory, which is the same in all batches."""

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
    Where examples have images but none of `rows` has, their smallest example with images follows as
    the blank: ranks that divide weights wait for one another in the layers that compute images.
    """
    kinds = value_kinds(examples)
    chosen = [examples[int(row)] for row in rows]
    blank = None if any(map(has_images, chosen)) else blank_of(examples)
    if not chosen:
        return filler(kinds, round_to=round_to, blank=blank)
    spans = tuple((len(e.prompt), tuple(len(a.tokens) for a in e.answers)) for e in chosen)
    segments = _segments(spans)
    placed = chosen if blank is None else [*chosen, blank]
    tokens = _tokens(placed)
    rounded = -(-len(tokens) // round_to) * round_to
    size = max(len(tokens), min(rounded, at_most or 1 << 62))
    tokens = _padded(tokens, size, 0)
    arrays = _per_token(segments, size) | _predictions(chosen, segments, tokens)
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        rows=tuple(int(row) for row in rows),
        spans=spans,
        values=_values(chosen, kinds, segments, size),
        **_inputs(placed, size, blank),
        **tensors,
    )


def filler(
    kinds: Mapping[str, str] | None = None, *, round_to: int = 1, blank: Example | None = None
) -> PackedBatch:
    """Return a row without examples, which keeps a rank in step with the others."""
    tokens = np.zeros(FILLER_TOKENS, np.int64) if blank is None else _tokens([blank])
    size = -(-len(tokens) // round_to) * round_to
    values = {
        name: torch.full((size if kind == PER_TOKEN else 0,), torch.nan)
        for name, kind in (kinds or {}).items()
    }
    batch = blank_batch(torch.from_numpy(_padded(tokens, size, 0)))
    if blank is None:
        return attrs.evolve(batch, values=values)
    return attrs.evolve(batch, values=values, **_inputs([blank], size, blank))


def has_images(example: Example) -> bool:
    """Return whether an input of an example that does not describe its tokens has any rows."""
    return any(len(example.inputs[name]) for name in _image_inputs(example))


def blank_of(examples: Sequence[Example]) -> Example | None:
    """Return the example with images that has the fewest tokens; None if no example has any. Of
    examples that the run has made, only the prompt, if no answer has images."""
    if not hasattr(examples, "lengths"):
        found = _smallest(examples)
        if found is None or SEGMENT_ROWS in found.inputs:
            return found
        return Example(found.prompt, (), inputs=prompt_inputs(found))
    if examples not in BLANKS:
        BLANKS[examples] = _smallest(examples)
    return BLANKS[examples]


def _smallest(examples: Any) -> Example | None:
    if not len(examples) or not examples[0].inputs:
        return None
    lengths = getattr(examples, "lengths", None)
    lengths = [*map(num_tokens, examples)] if lengths is None else lengths
    order = np.argsort(lengths, kind="stable")
    known = getattr(examples, "with_inputs", None)
    order = order if known is None else order[known[order]]
    return next(filter(has_images, (examples[int(number)] for number in order)), None)


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


def with_answers(
    example: Example, answers: Sequence[Answer], values: Mapping[str, Any] | None = None
) -> Example:
    """Return an example with other answers, of text, to the same prompt with its images."""
    inputs = prompt_inputs(example, *(len(answer.tokens) for answer in answers))
    return attrs.evolve(example, answers=answers, values=values or {}, inputs=inputs)


def prompt_inputs(example: Example, *lengths: int) -> dict[str, Any]:
    """Return the inputs of the prompt of `example`, followed by answers of so many tokens of text,
    such as those of another example."""
    inputs, tokens = {}, len(example.prompt)
    rows = _rows(example, _image_inputs(example))[0]
    for name, count in zip(_image_inputs(example), rows, strict=True):
        inputs[name] = example.inputs[name][:count]
    for name in {*TOKEN_INPUTS}.intersection(example.inputs):
        own = np.asarray(example.inputs[name])[:tokens]
        inputs[name] = np.concatenate([own, *(text_after(own, each, name) for each in lengths)])
    return inputs


def text_after(before: NDArray[Any], length: int, name: str) -> NDArray[Any]:
    """Return the input `name` of so many tokens of text after tokens with the input `before`
    [n, ...]."""
    rows = np.zeros((length, *before.shape[1:]), before.dtype)
    if name == "position_ids":
        # Text continues after the largest position, also after an image.
        first = int(before.max()) + 1 if len(before) else 0
        rows += np.arange(first, first + length).reshape(-1, *[1] * (before.ndim - 1))
    return rows


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
    room = tokens - len(example.prompt)
    starts, size = [0], 0
    for place, answer in enumerate(example.answers):
        size += len(answer.tokens)
        if size > room and place > starts[-1]:
            starts.append(place)
            size = len(answer.tokens)
    if len(starts) == 1 or PER_EXAMPLE in value_kinds([example]).values():
        return [example]
    parts = [slice(*ends) for ends in pairwise([*starts, len(example.answers)])]
    return [
        with_answers(
            example, example.answers[part],
            {name: value[part] for name, value in example.values.items()},
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


def _tokens(chosen: Sequence[Example]) -> NDArray[np.int64]:
    parts = [part for e in chosen for part in (e.prompt, *(a.tokens for a in e.answers))]
    return np.concatenate([np.asarray(part, np.int64) for part in parts])


def _image_inputs(example: Example) -> list[str]:
    """Return the names of the inputs that do not describe tokens."""
    return sorted({*example.inputs}.difference((*TOKEN_INPUTS, SEGMENT_ROWS)))


def _inputs(placed: Sequence[Example], size: int, blank: Example | None) -> dict[str, Any]:
    """Return `inputs`, `input_rows` and `blank` of a batch of T = `size` tokens with these
    examples, of which the last one may be the blank. Empty if no example has a row."""
    if not any(map(has_images, placed)):
        return {}
    inputs: dict[str, Any] = {}
    names = _image_inputs(placed[0])
    for name in placed[0].inputs:
        if name != SEGMENT_ROWS:
            parts = [as_array(example.inputs[name]) for example in placed]
            length = size if name in TOKEN_INPUTS else sum(map(len, parts))
            inputs[name] = torch.from_numpy(_joined(parts, length))
    rows = [_rows(example, names) for example in placed]
    if blank is not None:
        rows[-1] = rows[-1].sum(0, keepdims=True)
    columns = np.concatenate(rows).T.tolist()
    return {
        "inputs": inputs,
        "input_rows": {name: tuple(column) for name, column in zip(names, columns, strict=True)},
        "blank": 0 if blank is None else num_tokens(blank),
    }


def _rows(example: Example, names: Sequence[str]) -> NDArray[np.int64]:
    """Return how many rows of these inputs belong to the prompt and to each answer
    [1 + answers, names]."""
    found = np.asarray(example.inputs.get(SEGMENT_ROWS, ()), np.int64)
    if len(found):
        return found
    rows = np.zeros((1 + len(example.answers), len(names)), np.int64)
    rows[0] = [len(example.inputs[name]) for name in names]
    return rows


def as_array(value: Any) -> NDArray[Any]:
    """Return an input, which is a tensor, an array or nested lists, as an array; floating-point
    tensors and arrays of float64 become float32."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _joined(parts: Sequence[NDArray[Any]], length: int) -> NDArray[Any]:
    """Return the rows of all arrays as one of `length` rows. What they lack of it, and where other
    dimensions differ, is filled with zeros, as transformers' processors do."""
    parts = [part for part in parts if len(part)] or parts[:1]
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    joined, start = np.zeros((length, *shape), parts[0].dtype), 0
    for part in parts:
        end = start + len(part)
        joined[(slice(start, end), *map(slice, part.shape[1:]))] = part
        start = end
    return joined


def _padded(values: NDArray[np.int64], size: int, fill: int) -> NDArray[np.int64]:
    if len(values) == size:
        return values
    return np.concatenate([values, np.full(size - len(values), fill, np.int64)])
