"""A survey's examples that are the same in every epoch, so that values of them can be cached."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from rlhf.data.example import Example
from rlhf.data.examples import Packable
from rlhf.data.packing import PER_TOKEN, value_kinds
from rlhf.data.trees import TOKENS, tree


class SurveyedExamples:
    """What a trainer's `survey_examples` returned, with values per token as `Examples` has them."""

    def __init__(self, examples: Packable, computed: Mapping[str, Any] | None = None) -> None:
        self._examples = examples
        self._computed = dict(computed or {})
        self.files = (self,)
        self.lengths, self.longest_path = examples.lengths, examples.longest_path
        kinds = value_kinds(examples)  # type: ignore[arg-type]
        self.value_kinds = {**kinds, **dict.fromkeys(self._computed, PER_TOKEN)}

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, number: int) -> Example:
        example = self._examples[number]
        more = {name: values[number] for name, values in self._computed.items()}
        return attrs.evolve(example, values={**example.values, **more})

    def with_values(self, name: str, columns: Sequence[Any]) -> "SurveyedExamples":
        """Return these examples with one more value per token."""
        (values,) = columns
        return SurveyedExamples(self._examples, {**self._computed, name: values})

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Tokens of each example's prompt [n]."""
        return self._read[1]

    def digest(self) -> str:
        """Return a digest of all that a model sees of the examples, and of what it predicts."""
        return self._read[0]

    @cached_property
    def _read(self) -> tuple[str, NDArray[np.int64]]:
        """Digest and lengths of prompts, from one pass over the examples."""
        digest, lengths = hashlib.blake2b(digest_size=16), []
        for number in range(len(self)):
            row = tree(self._examples[number])
            lists = [np.asarray(row[name], np.int32) for name in TOKENS]
            inputs = row["arrays"].encode() + row["inputs"]
            digest.update(np.array([len(inputs), *map(len, lists)]).data)
            digest.update(np.concatenate(lists).data)
            digest.update(inputs)
            lengths.append(len(row["prompt"]))
        return digest.hexdigest(), np.array(lengths)
