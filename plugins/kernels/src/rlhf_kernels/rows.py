"""What kernels of attention need to know of a packed row: how long its examples are, and in which
parts FlashAttention computes it."""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import Literal

import torch
from packaging.version import Version
from torch import Tensor

from rlhf.engine import on_device
from rlhf.kernels import Spans, Tree

LONG = {"flash": 2048, "cudnn": 6144}
"""Mean tokens of a row's examples from which on a library of `libraries.py` is used, if they share
no prompt. FlashAttention is faster than our kernel from 1,000 on, but its calls take the host
longer; cuDNN is faster from about 6,000 on (benchmarks/NOTES.md)."""

LONG_SHARED = 4096
"""The same of FlashAttention for the mean path, a prompt with its longest answer, of a row with
shared prompts (benchmarks/RESULTS.md)."""

FLASH = "4.0.0b36"
"""The first version of flash-attn-4 that is used."""

FEWEST = 256
"""Lower bound of the largest lengths that FlashAttention gets. It would compile further kernels for
shorter ones."""

Form = Literal["one", "several", "shared"]
"""What a row holds: one or several plainly causal examples, or prompts with several answers."""


class Row:
    """The examples of one packed row.

    - `device`: that of the row.
    - `spans`: its prompts and answers.
    - `sizes` [n]: on the host, the number of tokens of each example.
    - `form`: the row's Form.
    - `libraries`: those that may compute layers without a window, the fastest first.
    - `parts`: the `layout` for FlashAttention, if it is among them.
    """

    def __init__(self, tree: Tree, libraries: tuple[str, ...] | None = None) -> None:
        self.device, self.spans = tree.owner.device, tree.spans
        self.sizes = torch.tensor(tree.lengths[:-1], dtype=torch.long)
        self.form: Form = "one" if len(self.sizes) == 1 else "several"
        if not all(tree.chains):
            self.form = "shared"
        paths = [prompt + max(answers, default=0) for prompt, answers in tree.spans]
        self.libraries = self._fitting(paths) if libraries is None else libraries
        self.parts: list[Tensor] = []
        if "flash" in self.libraries:
            self.parts = layout(tree.spans, len(tree.owner), self.device)

    def _fitting(self, paths: Sequence[int]) -> tuple[str, ...]:
        """Return the libraries for paths of these lengths."""
        mean = sum(paths) / max(len(paths), 1)
        longest = {"flash": LONG_SHARED} if self.form == "shared" else LONG
        return tuple(
            name
            for name, least in longest.items()
            if mean >= least and (name != "flash" or has_flash())
        )


@cache
def has_flash() -> bool:
    """Return whether FlashAttention 4 is installed."""
    try:
        return Version(version("flash-attn-4")) >= Version(FLASH)
    except PackageNotFoundError:
        return False


def layout(spans: Spans, num_tokens: int, device: torch.device) -> list[Tensor]:
    """Return how a row of `num_tokens` is computed: the ends of its segments, and, if prompts have
    several answers, the indices of the tokens of these answers and prompts, and the ends of both.
    The last tensor has the largest numbers of tokens between two ends, at least FEWEST, and stays
    on the host.

    A prompt and its only answer are one segment. The tokens that round the row up are in the last
    one.
    """
    segments: list[int] = []
    answers, prompts = [], []
    start = 0
    for prompt, replies in spans:
        middle, end = start + prompt, start + prompt + sum(replies)
        segments += [prompt, *replies] if len(replies) > 1 else [end - start]
        if prompt and len(replies) > 1:
            prompts.append(torch.arange(start, middle))
            answers.append(torch.arange(middle, end))
        start = end
    # No example sees what follows it.
    segments[-1:] = [sum(segments[-1:]) + num_tokens - start]
    lengths = [[length for length in segments if length]]
    indices = []
    if prompts:
        lengths += [[len(part) for part in parts] for parts in (answers, prompts)]
        indices = [torch.cat(answers), torch.cat(prompts)]
    ends = [torch.tensor(list(accumulate(part, initial=0)), dtype=torch.int32) for part in lengths]
    most = torch.tensor([max(FEWEST, *part) for part in lengths])
    return [*(on_device(tensor, device) for tensor in (ends[0], *indices, *ends[1:])), most]
