"""Marked text to token ids: a boundary in the text becomes a boundary between tokens."""

import itertools
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from rlhf.errors import RLHFError

ANCHORS = ("\n", ".", "a", "(")
"""Text put before a continuation and cut off again, for tokenizers that put a blank before every
text."""


@frozen
class Marked:
    """A text and the spans of its characters that are trained on."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """`(start, end)` in rising order, without overlap."""


@frozen
class Encoded:
    """A text as token ids."""

    ids: list[int]
    trained: list[tuple[int, int]]
    """`(start, end)` of the tokens that are trained on, in rising order."""


@frozen
class Piece:
    """A stretch of text that is tokenised by itself, since a reader of the prompt saw its start as
    an end."""

    text: str
    trained: int
    """So many of its first characters are trained on."""
    begins: bool
    """Nothing stands before it."""


class Encoder:
    """Tokenises texts in batches. Plain text gets BOS if the tokenizer adds one, exactly one; a
    rendered conversation has what its template writes, as whoever serves the model will have it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.eos: int | None = tokenizer.eos_token_id
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        full = tokenizer("a")["input_ids"]
        bos = tokenizer.bos_token_id
        adds = bos is not None and full[:1] == [bos] and plain[:1] != [bos]
        self.bos: int | None = bos if adds else None
        self._special = {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        } | set(tokenizer.all_special_ids)
        self._direct = _is_plain(tokenizer)
        self._anchored = self._puts_blank_first()

    def encode(self, documents: Sequence[Marked], plain: Sequence[bool]) -> list[Encoded]:
        """Of each document, `plain` text or rendered, its token ids and which of them are trained
        on.

        A token is trained on if and only if it lies wholly within a span. Every span's start is a
        boundary, so that what stands before it has the very ids that a prompt would have.
        """
        cut = [_cut(document) for document in documents]
        done = iter(self._encode_pieces([piece for pieces in cut for piece in pieces]))
        out = []
        for pieces, is_plain in zip(cut, plain, strict=True):
            ids: list[int] = []
            runs: list[tuple[int, int]] = []
            for part, kept in itertools.islice(done, len(pieces)):
                if kept:
                    runs.append((len(ids), len(ids) + kept))
                ids += part
            if is_plain and self.bos is not None and ids[:1] != [self.bos]:
                ids = [self.bos, *ids]
                runs = [(start + 1, end + 1) for start, end in runs]
            out.append(Encoded(ids, runs))
        return out

    def encode_stretches(
        self, texts: Sequence[Sequence[str]], plain: Sequence[bool]
    ) -> list[list[list[int]]]:
        """Of each sequence of texts that follow one another the ids of each, with BOS in the first
        where that is `plain` text."""
        pieces = []
        for parts in texts:
            before = ""
            for part in parts:
                pieces.append(Piece(part, len(part), begins=not before))
                before += part
        done = iter(self._encode_pieces(pieces))
        out = []
        for parts, is_plain in zip(texts, plain, strict=True):
            ids = [[*next(done)[0]] for _ in parts]
            start = next((number for number, part in enumerate(ids) if part), 0)
            if is_plain and self.bos is not None and ids[start][:1] != [self.bos]:
                ids[0] = [self.bos, *ids[0]]
            out.append(ids)
        return out

    def _encode_pieces(self, pieces: Sequence[Piece]) -> list[tuple[list[int], int]]:
        """Of each piece its ids and how many of the first are trained on. The ids of equal pieces
        are one list."""
        anchors = [ANCHORS[0] if self._anchored and not p.begins else "" for p in pieces]
        whole: dict[str, list[int]] = {}
        split: list[str] = []
        for piece, anchor in zip(pieces, anchors, strict=True):
            if anchor or 0 < piece.trained < len(piece.text):
                split.append(anchor + piece.text)
            else:
                whole[piece.text] = []
        whole = dict(zip(whole, self._ids(list(whole)), strict=True))
        ids, encodings = self._tokenise(split)
        number, out = 0, []
        for piece, anchor in zip(pieces, anchors, strict=True):
            if anchor or 0 < piece.trained < len(piece.text):
                encoding = encodings[number] if encodings is not None else None
                out.append(self._finish(piece, anchor, ids[number], encoding))
                number += 1
            else:
                found = whole[piece.text]
                out.append((found, len(found) if piece.trained else 0))
        return out

    def _finish(
        self, piece: Piece, anchor: str, ids: list[int], encoding: Any
    ) -> tuple[list[int], int]:
        skipped = 0
        if anchor:
            found = self._boundary(encoding, len(anchor))
            if found is None:
                return self._try_next_anchor(piece, anchor)
            skipped = found
        if piece.trained == len(piece.text):
            return ids[skipped:], len(ids) - skipped
        if piece.trained == 0:
            return ids[skipped:], 0
        end = None
        if encoding is not None:
            end = self._boundary(encoding, len(anchor) + piece.trained)
        if end is not None:
            return ids[skipped:], end - skipped
        first = Piece(piece.text[: piece.trained], piece.trained, piece.begins)
        rest = Piece(piece.text[piece.trained :], 0, begins=False)
        (head, kept), (tail, _) = self._encode_pieces([first, rest])
        return head + tail, kept

    def _try_next_anchor(self, piece: Piece, tried: str) -> tuple[list[int], int]:
        place = ANCHORS.index(tried) + 1
        if place == len(ANCHORS):
            raise RLHFError(
                f"the tokenizer cannot continue a text at {piece.text[:40]!r}: "
                "use a chat template that ends its header with a special token"
            )
        ids, encodings = self._tokenise([ANCHORS[place] + piece.text])
        return self._finish(piece, ANCHORS[place], ids[0], encodings and encodings[0])

    def _boundary(self, encoding: Any, place: int) -> int | None:
        """How many tokens stand before character `place`; None where a token may straddle it."""
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
        # Byte-level tokenizers leave blanks out of the offsets; after a special token they are the
        # next one's.
        return int(token) if ids[token - 1] in self._special else None

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """The ids alone, straight from the backend, which is a third faster without offsets."""
        if not self._direct or not texts:
            return self._tokenise(texts)[0]
        backend = self.tokenizer.backend_tokenizer
        # Whoever called the tokenizer last may have left these set.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        backend.encode_special_tokens = self.tokenizer.split_special_tokens
        return [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _tokenise(self, texts: list[str]) -> tuple[list[list[int]], Any]:
        if not texts:
            return [], None
        out = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return out["input_ids"], out.encodings

    def _puts_blank_first(self) -> bool:
        """Whether a text by itself begins otherwise than the same text after another."""
        if not self.tokenizer.is_fast:
            return False
        for anchor in ANCHORS:
            ids, encodings = self._tokenise(["Ab", anchor + "Ab"])
            found = self._boundary(encodings[1], len(anchor))
            if found is not None:
                return bool(ids[1][found:] != ids[0])
        return False


def _is_plain(tokenizer: Any) -> bool:
    """Whether calling the tokenizer is calling its backend: no class of its own comes between."""
    for kind in type(tokenizer).__mro__:
        if kind.__module__.startswith("transformers.tokenization_"):
            return bool(tokenizer.is_fast)
        if {"__call__", "_encode_plus", "_batch_encode_plus"} & vars(kind).keys():
            return False
    return False


def _cut(document: Marked) -> list[Piece]:
    """The pieces between the starts of the spans."""
    starts = [start for start, _ in document.spans]
    bounds = [*sorted({0, *starts}), len(document.text)]
    ends = dict(document.spans)
    return [
        Piece(document.text[low:high], ends.get(low, low) - low, begins=low == 0)
        for low, high in itertools.pairwise(bounds)
        if high > low
    ]
