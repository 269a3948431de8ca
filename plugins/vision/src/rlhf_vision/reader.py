"""The reader of images that core calls: a row is opened, the texts of its paths get as many
placeholders as the model computes features, and its tree gets the inputs of the model."""

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray
from PIL import Image

from rlhf.errors import RLHFError, counted
from rlhf.formats import BadImage
from rlhf.plugin import ModelConfig
from rlhf.trainer import Answer, Example
from rlhf_rows import Columns, Encoded, Rendered, Row, Unencoded
from rlhf_vision.opening import DROP, file_digest, name_of, open_image
from rlhf_vision.processor import Arrays, Prepared, Processor
from rlhf_vision.rows import Shaper
from rlhf_vision.thumbnails import NUM_THUMBNAILS, thumbnail

SEGMENT_ROWS = "segment_rows"
"""The input that says how many rows of each other one, by name, belong to the prompt and to each
answer [1 + answers, inputs]."""


class Images:
    """Opens the images of rows for one model."""

    def __init__(self, model: ModelConfig, tokenizer: Any) -> None:
        self.processor = Processor(model)
        self.digest = self.processor.digest
        self.feature = self.processor.feature
        self._tokenizer = tokenizer

    def open(self, row: Columns, folder: Path | None) -> "RowImages":
        """Return the images of a row. Raises BadImage."""
        ours, values = Shaper(self.processor.placeholders).shape(row)
        files: dict[str, str] = {}
        pictures = {}
        for number, value in enumerate(values):
            name = name_of(number, value)
            pictures[name] = open_image(name, value, folder, files)
        return RowImages(ours, pictures, files, self)

    def file_digest(self, path: str, folder: Path, known: str = "") -> str:
        """Return the present digest of a file of an image, which was `known`."""
        return file_digest(path, folder, known)

    @functools.cached_property
    def bos(self) -> str | None:
        """The token that the processor puts before a text that does not begin with it."""
        return self._tokenizer.bos_token if self.processor.adds_bos else None

    def without_features(self, answer: Answer) -> Answer:
        """Return an answer that is not trained on features, which no model writes."""
        others = [token != self.feature for token in answer.tokens]
        if all(others):
            return answer
        trained = others if answer.trained is None else answer.trained
        both = [a and b for a, b in zip(trained, others, strict=True)]
        return attrs.evolve(answer, trained=both)

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def num_features(self, text: str) -> int:
        """Return the number of features in what a placeholder becomes."""
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return int(ids.count(self.processor.feature))


@define(eq=False)
class RowImages:
    """The images of a row."""

    row: dict[str, Any]
    """The row with a numbered part for each image."""
    pictures: dict[str, Image.Image]
    """The images in RGB, by the names that errors call them."""
    files: dict[str, str]
    reader: Images
    _prepared: dict[tuple[int, ...], Prepared] = field(factory=dict)

    def expand(self, unencoded: Unencoded) -> Unencoded:
        """Return texts with a placeholder for each feature. Raises BadImage if the placeholders of
        a text do not match its images."""
        texts, make = unencoded
        numbers = [self._numbers(text) for text in texts]
        self._check_prompts(texts, numbers)
        self._check_common(numbers)
        expanded = [self._expanded(*pair) for pair in zip(texts, numbers, strict=True)]

        def made(paths: list[Encoded]) -> Row:
            row = make(paths)
            answers = [self.reader.without_features(answer) for answer in row.answers]
            return attrs.evolve(row, answers=answers, images=TreeImages(self, numbers))

        return expanded, made

    @functools.cached_property
    def thumbnails(self) -> list[str]:
        """Small pictures of the first images, as data URLs."""
        first = itertools.islice(self.pictures.values(), NUM_THUMBNAILS)
        return [thumbnail(picture) for picture in first]

    def prepared(self, numbers: Sequence[int]) -> Prepared:
        """Return images of the row as one prompt's, prepared once."""
        key = tuple(numbers)
        if key not in self._prepared:
            names = [*self.pictures]
            chosen = {names[number]: self.pictures[names[number]] for number in key}
            try:
                if len(chosen) < len(key):
                    chosen = {
                        f"{names[n]} (use {u + 1})": self.pictures[names[n]]
                        for u, n in enumerate(key)
                    }
                self._prepared[key] = self.reader.processor.prepare(chosen)
            except BadImage as error:
                raise BadImage(str(error), self.files) from None
        return self._prepared[key]

    def _numbers(self, text: Rendered) -> tuple[int, ...]:
        """Return the numbers of the images in a text, in order."""
        count = len(self._places(text))
        numbers = tuple(range(len(self.pictures))) if text.images is None else text.images
        if text.images is None and not count:
            return ()
        if count != len(numbers):
            raise BadImage(
                f"the text has {counted(count, 'placeholder')} "
                f"{self.reader.processor.placeholders.token} for {counted(len(numbers), 'image')}; "
                f"correct the row, {DROP}", self.files
            )  # fmt: skip
        return numbers

    def _places(self, text: Rendered) -> list[tuple[int, int]]:
        token = re.escape(self.reader.processor.placeholders.token)
        return [match.span() for match in re.finditer(token, text.text)]

    def _check_prompts(self, texts: Sequence[Rendered], numbers: Sequence[Sequence[int]]) -> None:
        """Raise RLHFError if texts that begin alike do not begin with the same images: their tokens
        would be one prompt."""
        for text, chosen in zip(texts[1:], numbers[1:], strict=True):
            pairs = zip(self._places(texts[0]), numbers[0], chosen, strict=False)
            for (_, end), one, other in pairs:
                if one != other and texts[0].text[:end] == text.text[:end]:
                    raise RLHFError(
                        f"the answers have different images after the same text (image {one + 1} "
                        f"and image {other + 1}); give all answers one prompt with the same images"
                    )

    def _check_common(self, numbers: Sequence[tuple[int, ...]]) -> None:
        """Check the groups of paths whose first images are the same."""
        size = min(map(len, numbers))
        ends = [n for n, each in enumerate(zip(*numbers, strict=False)) if len(set(each)) > 1]
        self.check_groups(numbers[0][: min([size, *ends])], numbers)

    def check_groups(self, shared: tuple[int, ...], paths: Sequence[tuple[int, ...]]) -> None:
        """Raise RLHFError if images after the `shared` ones, which are those of the prompt, are
        prepared otherwise together with them."""
        for path in paths:
            groups = [group for group in (shared, path[len(shared) :]) if group]
            texts = [text for group in groups for text in self.prepared(group).texts]
            if len(groups) > 1 and self.prepared(path).texts != texts:
                raise RLHFError(
                    "the processor of this model prepares images of the prompt and of an answer as "
                    "one; move all images to the prompt, or remove the row"
                )

    def _expanded(self, text: Rendered, numbers: Sequence[int]) -> Rendered:
        if not numbers:
            return text
        places, parts, shifts, end = self._places(text), [], [], 0
        for (start, stop), becomes in zip(places, self.prepared(numbers).texts, strict=True):
            parts += [text.text[end:start], becomes]
            shifts.append((stop, len(becomes) - (stop - start)))
            end = stop

        def moved(place: int) -> int:
            return place + sum(shift for stop, shift in shifts if stop <= place)

        whole = "".join([*parts, text.text[end:]])
        spans = tuple((moved(start), moved(stop)) for start, stop in text.spans)
        bos = self.reader.bos
        adds = bos is not None and not whole.startswith(bos)
        return attrs.evolve(text, text=whole, spans=spans, bos=text.bos or adds)


@frozen(eq=False)
class TreeImages:
    """The images of the tree that a row becomes."""

    of: RowImages
    numbers: Sequence[tuple[int, ...]]
    """The numbers of the images of each path, in order."""

    @property
    def files(self) -> Mapping[str, str]:
        """Digests of the files that were read, by the path in the row."""
        return self.of.files

    @property
    def lines(self) -> list[str]:
        """A line about each image, with its size and its tokens in the first path with it."""
        sizes: dict[int, int] = {}
        for path in self.numbers:
            for number, count in zip(path, self._counts(path), strict=True):
                sizes.setdefault(number, count)
        out = []
        for number, (name, image) in enumerate(self.of.pictures.items()):
            tokens = counted(sizes.get(number, 0), "token")
            out.append(f"{name}: {image.width} x {image.height} pixels, {tokens}")
        return out

    @property
    def thumbnails(self) -> list[str]:
        """Small pictures of the first images of the row, as data URLs."""
        return self.of.thumbnails

    def inputs(self, example: Example) -> Arrays:
        """Return the inputs of an example: images in the order of the tree's tokens, and what
        describes the tokens. Raises RLHFError if the tokens do not match the images."""
        shared, own = self._segments(example)
        if not shared and not any(own):
            return {}
        processor = self.of.reader.processor
        answers = [np.asarray(answer.tokens, np.int64) for answer in example.answers]
        prompt = np.asarray(example.prompt, np.int64)
        tokens = np.concatenate([prompt, *answers])
        several = any(own)
        groups = [shared, *own]
        if len(own) == 1:  # The whole path is prepared as one, and counts as the prompt's.
            groups = [(*shared, *own[0]), ()]
        self.of.check_groups(groups[0], [(*groups[0], *answer) for answer in groups[1:]])
        parts = [self.of.prepared(group).arrays if group else {} for group in groups]
        inputs = joined(parts)
        if several:
            names = sorted(inputs)
            rows = [[len(part[name]) if part else 0 for name in names] for part in parts]
            inputs[SEGMENT_ROWS] = np.array(rows, np.int64)
        inputs |= processor.types(tokens.tolist())
        laid: list[NDArray[np.int64]] = []
        for number, answer in enumerate(answers or [prompt[:0]]):
            path = [*prompt.tolist(), *answer.tolist()]
            own_images = joined([parts[0], parts[1 + number]]) if several else parts[0]
            positions = processor.positions(path, own_images)
            if positions is None:
                return inputs
            laid += [positions[len(prompt) :] if laid else positions]
        return {**inputs, "position_ids": np.concatenate(laid)}

    def _segments(self, example: Example) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """Return the numbers of the images in the prompt, and in each answer."""
        feature = self.of.reader.processor.feature
        numbers, alike = list(self.numbers), True
        if len(numbers) != len(example.answers):
            alike = len({*numbers}) == 1
            numbers = numbers[:1] * max(1, len(example.answers))
        counts = [self._counts(path) for path in numbers]
        in_prompt = int(np.sum(np.asarray(example.prompt) == feature))
        sums = np.cumsum([0, *counts[0]]).tolist()
        size = sums.index(in_prompt) if in_prompt in sums else -1
        shared = numbers[0][: max(size, 0)]
        own = [path[max(size, 0) :] for path in numbers[: len(example.answers)]]
        right = alike and size >= 0 and all(path[:size] == shared for path in numbers)
        for answer, count in zip(example.answers, counts, strict=False):
            right &= int(np.sum(np.asarray(answer.tokens) == feature)) == sum(count[size:])
        if not right:
            raise RLHFError("the example does not have the images of its row, whole and in order")
        return shared, own

    def _counts(self, path: Sequence[int]) -> list[int]:
        texts = self.of.prepared(path).texts if path else []
        return [self.of.reader.num_features(text) for text in texts]


def joined(parts: Sequence[Arrays]) -> Arrays:
    """Return arrays by name, one after another; those whose other dimensions are smaller are filled
    up with zeros, as processors do."""
    filled = [part for part in parts if part]
    if len(filled) < 2:
        return dict(filled[0]) if filled else {}
    return {name: _stacked([part[name] for part in filled]) for name in filled[0]}


def _stacked(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    shape = np.max([array.shape[1:] for array in arrays], axis=0).astype(int)
    filled = []
    for array in arrays:
        missing = shape - np.array(array.shape[1:], int)
        filled.append(np.pad(array, [(0, 0), *((0, int(size)) for size in missing)]))
    return np.concatenate(filled)
