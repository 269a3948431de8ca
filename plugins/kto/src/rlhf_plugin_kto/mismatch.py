"""Every prompt with the completion of another row: the pairs over which the KL divergence is
estimated."""

import numpy as np
from numpy.typing import NDArray

from rlhf.errors import RLHFError
from rlhf.trainer import Answer, Example, Examples, prompt_inputs


def partners(groups: NDArray[np.int64], draw: np.random.Generator) -> NDArray[np.int64]:
    """Return a permutation of the n members [n] that maps none into its own group.

    The members are lined up group by group in a drawn order, then rotated by the size of the
    largest group, so that each passes its own. Raises RLHFError if one group holds more than half
    of all: then no such permutation exists (Hall's theorem).
    """
    _, place, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    largest = int(sizes.max())
    if 2 * largest > len(groups):
        raise RLHFError(
            f"{largest} of {len(groups)} examples come from one row, so they cannot all be paired "
            "with the completion of another row for kto.loss kto; add rows, lower the weight of "
            "this one, or set kto.loss to apo_zero_unpaired"
        )
    within = draw.permutation(len(groups))
    order = within[np.argsort(draw.permutation(len(sizes))[place[within]], kind="stable")]
    partner = np.empty_like(order)
    partner[order] = np.roll(order, -largest)
    return partner


class Mismatched:
    """Examples of one answer, of which i has the prompt of example i, its values per example, and
    the answer of its partner.

    An answer is cut at its end if its path would be longer than the longest path of the data, so
    that it fits wherever the data does.
    """

    def __init__(self, examples: Examples, draw: np.random.Generator) -> None:
        self._examples = examples
        self._partner = partners(examples.sources, draw)
        self._longest = int(examples.longest_path.max())
        answers = examples.longest_path - examples.prompt_lengths
        self.longest_path = np.minimum(
            examples.prompt_lengths + answers[self._partner], self._longest
        )
        """Tokens of prompt and answer [n]."""
        self.lengths = self.longest_path
        """Tokens of the packed tree [n]."""
        self.with_inputs = examples.with_inputs
        """Whether each prompt has inputs, such as images [n]."""
        kinds = examples.value_kinds
        self.value_kinds = {name: kind for name, kind in kinds.items() if kind == "example"}

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, number: int) -> Example:
        own = self._examples[number]
        (other,) = self._examples[int(self._partner[number])].answers
        room = self._longest - len(own.prompt)
        trained = other.trained if other.trained is None else other.trained[:room]
        values = {name: own.values[name] for name in self.value_kinds}
        tokens = other.tokens[:room]
        inputs = prompt_inputs(own, len(tokens))
        return Example(own.prompt, [Answer(tokens, trained)], values, inputs)
