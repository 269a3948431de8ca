"""Text to token ids: the boundary between what is trained on and what is not becomes a boundary
between tokens, unless the text has to be tokenised as one."""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from attrs import frozen

from rlhf.errors import RLHFError
from rlhf.formats import Row
from rlhf.plugin import documented

ANCHORS = ("\n", ".", "a", "(")
"""Texts that are put before a continuation and cut off again, for tokenizers that put a blank
before every text."""

Sequential = TypeVar("Sequential", str, list[int])
"""A text or its token ids."""
Tokens = tuple[list[int], int]
"""Token ids, and how many of the first of them are trained on."""


@documented
@frozen
class Rendered:
    """A prompt with an answer as text, and the spans of it that are trained on."""

    text: str
    """The prompt, then the answer."""
    spans: tuple[tuple[int, int], ...]
    """`(start, end)` of characters, in rising order, without overlap."""
    bos: bool = False
    """Whether BOS is added, if the tokenizer adds it to plain text."""
    eos: bool = False
    """Whether EOS is added, which is trained on."""
    images: tuple[int, ...] | None = None
    """Numbers of the images in the text, in order, in a row with images; None for the first ones of
    the row."""


@documented
@frozen
class Encoded:
    """A text as token ids."""

    ids: list[int]
    """Token ids."""
    trained: list[tuple[int, int]]
    """`(start, end)` of the tokens of each span, in rising order; equal if it has none."""


Unencoded = tuple[list[Rendered], Callable[[list[Encoded]], Row]]
"""A row before it is tokenised: the text of each path, and what makes a row of their token ids."""


@frozen
class Piece:
    """A part of a text that is tokenised separately: at its start, the prompt of an answer ends."""

    text: str
    trained: int
    """How many of its first characters are trained on."""
    begins: bool
    """Whether the text begins with this piece."""

    @property
    def uniform(self) -> bool:
        """Whether all of it is trained on, or none of it."""
        return self.trained in (0, len(self.text))

    def halves(self) -> "tuple[Piece, Piece]":
        """Return what is trained on and the rest."""
        head, rest = self.text[: self.trained], self.text[self.trained :]
        return Piece(head, self.trained, self.begins), Piece(rest, 0, begins=False)


class Encoder:
    """Tokenises texts in batches."""

    def __init__(self, tokenizer: Any, *, as_one: bool = False) -> None:
        """With `as_one`, texts are not cut: their ids are those of the tokenizer, and a token may
        cross the start of a span. Tokenizers without offsets cut all the same."""
        self.tokenizer = tokenizer
        self._as_one = as_one and tokenizer.is_fast
        self.eos: int | None = tokenizer.eos_token_id
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        full = tokenizer("a")["input_ids"]
        bos = tokenizer.bos_token_id
        adds = bos is not None and full[:1] == [bos] and bare[:1] != [bos]
        self.bos: int | None = bos if adds else None
        """BOS if the tokenizer adds it."""
        self._special = {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        } | set(tokenizer.all_special_ids)
        self._direct = _calls_backend(tokenizer)
        self._anchored = self._puts_blank_first()

    def encode(self, texts: Sequence[Rendered]) -> list[Encoded]:
        """Return the token ids of each text and which of them are trained on.

        A token is trained on if and only if it lies wholly within a span, and so is an EOS that is
        added. Every span starts at a token boundary, so that what precedes it has the same ids as
        the prompt by itself, unless texts are tokenised as one.
        """
        encoded = self._encode_as_one(texts) if self._as_one else self._encode_in_parts(texts)
        out = []
        for text, ids in zip(texts, encoded, strict=True):
            begun = self._with_bos(ids) if text.bos else ids
            out.append(self._with_eos(begun) if text.eos else begun)
        return out

    def _encode_as_one(self, texts: Sequence[Rendered]) -> list[Encoded]:
        out = []
        tokenised = self._tokenise([text.text for text in texts])
        for text, (ids, encoding) in zip(texts, tokenised, strict=True):
            starts, ends = ([pair[side] for pair in encoding.offsets] for side in (0, 1))
            runs = []
            for start, end in text.spans:
                first = bisect_left(starts, start)
                runs.append((first, max(first, bisect_right(ends, end))))
            out.append(Encoded(ids, runs))
        return out

    def _encode_in_parts(self, texts: Sequence[Rendered]) -> list[Encoded]:
        """Tokenise each text in the parts that begin with its spans."""
        cut = [_cut(text) for text in texts]
        pieces = iter(self._encode_pieces([piece for parts in cut for piece in parts]))
        out = []
        for parts in cut:
            ids: list[int] = []
            runs: list[tuple[int, int]] = []
            for piece, (tokens, trained) in zip(parts, pieces, strict=False):
                if piece.trained:
                    runs.append((len(ids), len(ids) + trained))
                ids += tokens
            out.append(Encoded(ids, runs))
        return out

    def _with_bos(self, text: Encoded) -> Encoded:
        if self.bos is None or text.ids[:1] == [self.bos]:
            return text
        runs = [(start + 1, end + 1) for start, end in text.trained]
        return Encoded([self.bos, *text.ids], runs)

    def _with_eos(self, text: Encoded) -> Encoded:
        """Return the text with EOS, which is trained on, unless it ends with EOS already."""
        if self.eos is None or text.ids[-1:] == [self.eos]:
            return text
        size, runs = len(text.ids), [*text.trained]
        start = runs.pop()[0] if runs and runs[-1][1] == size else size
        return Encoded([*text.ids, self.eos], [*runs, (start, size + 1)])

    def _encode_pieces(self, pieces: Sequence[Piece]) -> list[Tokens]:
        """Tokenise all pieces, and once more in halves those in which a token crosses the end of
        what is trained on. Equal pieces share one list of ids."""
        encoded = self._encode_whole(pieces)
        crossed = {piece: piece.halves() for piece in pieces if piece not in encoded}
        halves = self._encode_whole([half for pair in crossed.values() for half in pair])
        for piece, (head, rest) in crossed.items():
            ids, trained = halves[head]
            encoded[piece] = ids + halves[rest][0], trained
        return [encoded[piece] for piece in pieces]

    def _encode_whole(self, pieces: Sequence[Piece]) -> dict[Piece, Tokens]:
        """Tokenise each piece as one text. Left out are those in which a token crosses the end of
        what is trained on, which none does in a uniform piece."""
        simple = [piece for piece in pieces if piece.uniform and not self._needs_anchor(piece)]
        texts = list(dict.fromkeys(piece.text for piece in simple))
        ids = dict(zip(texts, self._ids(texts), strict=True))
        out = {p: (ids[p.text], len(ids[p.text]) if p.trained else 0) for p in simple}
        waiting = [piece for piece in dict.fromkeys(pieces) if piece not in out]
        for anchor in ANCHORS:
            prefixes = [anchor if self._needs_anchor(piece) else "" for piece in waiting]
            pairs = list(zip(waiting, prefixes, strict=True))
            tokenised = self._tokenise([prefix + piece.text for piece, prefix in pairs])
            failed = []
            for (piece, prefix), (tokens, encoding) in zip(pairs, tokenised, strict=True):
                start, end = self._ends(piece, len(prefix), encoding, len(tokens))
                if start is None:
                    failed.append(piece)
                elif end is not None:
                    out[piece] = tokens[start:], end - start
            waiting = failed
        if waiting:
            raise RLHFError(
                f"the tokenizer cannot continue a text at {waiting[0].text[:40]!r}; "
                "use a chat template that ends its header with a special token"
            )
        return out

    def _ends(
        self, piece: Piece, place: int, encoding: Any, size: int
    ) -> tuple[int | None, int | None]:
        """Return which of `size` tokens is the first of a piece that begins at character `place`,
        and which is the first that is not trained on; None if a token may cross its start."""
        start = self._boundary(encoding, place) if place else 0
        if piece.uniform:
            return start, size if piece.trained else start
        if encoding is None:
            return start, None
        return start, self._boundary(encoding, place + piece.trained)

    def _needs_anchor(self, piece: Piece) -> bool:
        return self._anchored and not piece.begins

    def _boundary(self, encoding: Any, place: int) -> int | None:
        """Return how many tokens precede character `place`; None if a token may cross it."""
        token = encoding.char_to_token(place - 1)
        if token is None:
            return None
        token += 1
        ids = encoding.ids
        # A character of several bytes may be several tokens.
        while token < len(ids) and encoding.token_to_chars(token)[1] <= place:
            token += 1
        if encoding.token_to_chars(token - 1)[1] > place:
            return None
        if token == len(ids) or encoding.token_to_chars(token)[0] == place:
            return int(token)
        # Byte-level tokenizers leave blanks out of the offsets; after a special token they belong
        # to the next one.
        return int(token) if ids[token - 1] in self._special else None

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """Return only the ids, straight from the backend: a third faster than with offsets."""
        if not self._direct or not texts:
            return [ids for ids, _ in self._tokenise(texts)]
        backend = self.tokenizer.backend_tokenizer
        # An earlier call of the tokenizer may have left these set.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        backend.encode_special_tokens = self.tokenizer.split_special_tokens
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _tokenise(self, texts: list[str]) -> list[tuple[list[int], Any]]:
        """Return the ids of each text, and its encoding, which has the characters of each token:
        None from a tokenizer without offsets."""
        if not texts:
            return []
        out = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return list(zip(out["input_ids"], out.encodings or [None] * len(texts), strict=True))

    def _puts_blank_first(self) -> bool:
        """Return whether the tokens of a text depend on whether another text precedes it."""
        if not self.tokenizer.is_fast:
            return False
        for anchor in ANCHORS:
            (single, _), (after, encoding) = self._tokenise(["Ab", anchor + "Ab"])
            start = self._boundary(encoding, len(anchor))
            if start is not None:
                return bool(after[start:] != single)
        return False


def common_prefix(sequences: Sequence[Sequential]) -> Sequential:
    """Return what all of the texts, or lists of token ids, begin with."""
    low, high = min(sequences), max(sequences)
    size = min(len(low), len(high))
    if low[:size] == high[:size]:
        return low[:size]
    return low[: next(place for place in range(size) if low[place] != high[place])]


def _calls_backend(tokenizer: Any) -> bool:
    """Return whether calling the tokenizer is the same as calling its backend: it is a fast one, of
    which no class overrides the call."""
    for kind in type(tokenizer).__mro__:
        if kind.__module__.startswith("transformers.tokenization_"):
            return bool(tokenizer.is_fast)
        if {"__call__", "_encode_plus", "_batch_encode_plus"} & vars(kind).keys():
            return False
    return False


def _cut(text: Rendered) -> list[Piece]:
    """Cut a text at the starts of its spans."""
    bounds = [*sorted({0, *(start for start, _ in text.spans)}), len(text.text)]
    ends = dict(text.spans)
    return [
        Piece(text.text[low:high], ends.get(low, low) - low, begins=low == 0)
        for low, high in itertools.pairwise(bounds)
        if high > low
    ]
