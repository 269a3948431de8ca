"""Which library computes attention of a row of long examples on CUDA in the place of our kernel:
FlashAttention 4, if it is installed, or cuDNN, each where it gives what our kernel gives."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.errors import first_line
from rlhf.kernels import Scoring, Spans, Tree, TreeMask, blank_batch
from rlhf_kernels.cudnn import long_examples
from rlhf_kernels.flash import flash_row
from rlhf_kernels.rows import Form, Row
from rlhf_kernels.tree import Heads, fused_tree

AGREEMENT = 2e-2
"""Largest accepted error, as a share of the norm: rounding to bf16 gives 4e-3."""

PROBED: dict[Form, Spans] = {
    "one": ((80, (816,)),),
    "several": ((0, (700,)), (80, (500,))),
    "shared": ((300, (500,)), (200, (150, 130))),
}
"""Prompts and answers on which a library is compared with our kernel."""


class Library(NamedTuple):
    """Attention of a row by a library."""

    attend: Callable[..., Tensor]
    """(query, key, value, row, scale) -> output, of the shapes of `fused_tree`."""
    deterministic: bool
    """Whether its gradients can be the same in each run."""


LIBRARIES = {
    "flash": Library(
        lambda query, key, value, row, scale: flash_row(query, key, value, row.parts, scale),
        deterministic=True,
    ),
    "cudnn": Library(
        lambda query, key, value, row, scale: long_examples(query, key, value, row.sizes, scale),
        deterministic=False,
    ),
}


class Libraries:
    """The choice of a library for each row of a process."""

    def __init__(self) -> None:
        self.kinds: set[Heads] = set()
        """The kinds of attention that have run on CUDA and that libraries may compute."""
        self._agrees: dict[tuple[str, Heads, Form, torch.device], bool] = {}

    def choose(self, row: Row) -> dict[Heads, str]:
        """Return the library that computes a row, by the kind of attention. Kinds that have not run
        yet, and those for which no library agrees with our kernel, are left out."""
        if row.device.type == "meta":
            return {}
        deterministic = torch.are_deterministic_algorithms_enabled()
        names = [
            name for name in row.libraries if LIBRARIES[name].deterministic or not deterministic
        ]
        chosen = {}
        for kind in self.kinds:
            for name in names:
                if self.agrees(name, kind, row.form, row.device):
                    chosen[kind] = name
                    break
        return chosen

    def agrees(self, name: str, kind: Heads, form: Form, device: torch.device) -> bool:
        """Return whether a library runs here and gives the values and gradients of our kernel on a
        row of random examples."""
        key = name, kind, form, device
        if key not in self._agrees:
            problem = disagreement(name, kind, PROBED[form], device)
            self._agrees[key] = problem is None
            if problem is not None and name == "flash":  # It was installed to be used.
                warnings.warn(f"FlashAttention 4 is not used, since it {problem}", stacklevel=2)
        return self._agrees[key]


def disagreement(name: str, kind: Heads, spans: Spans, device: torch.device) -> str | None:
    """Return how a library's values or gradients differ from our kernel's on random numbers in the
    place of examples, or why it does not run; None if they agree."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = (
        (kind.heads, kind.width), (kind.key_heads, kind.width), (kind.key_heads, kind.of_value),
        (kind.heads, kind.of_value),
    )  # fmt: skip
    num_tokens = sum(prompt + sum(answers) for prompt, answers in spans)
    query, key, value, weights = (
        torch.randn(
            1, num_tokens, *shape, generator=generator, device=device, dtype=kind.dtype
        ).transpose(1, 2)
        for shape in shapes
    )
    batch = blank_batch(torch.zeros(num_tokens, dtype=torch.long, device=device), spans)
    tree = Tree(batch)
    row = Row(tree, libraries=(name,))
    mask = TreeMask(tree, None, row)
    library = partial(LIBRARIES[name].attend, row=row, scale=kind.scale)
    kernel = partial(fused_tree, mask=mask, scoring=Scoring(0.0, kind.scale, None, None))
    try:
        theirs = values_and_gradients(library, query, key, value, weights)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # No such kernel for this device or version: each raises its own.
        return f"does not run here: {first_line(error)}"
    ours = values_and_gradients(kernel, query, key, value, weights)
    errors = [(a - b).norm() / b.norm() for a, b in zip(theirs, ours, strict=True)]
    largest = float(torch.stack(errors).max())
    if largest < AGREEMENT:
        return None
    return f"differs from our kernel by {largest:.1e} of the norm"


def values_and_gradients(attend: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the output of `attend` on query, key and value, and their gradients for the weights of
    the last input."""
    *values, weights = inputs
    with torch.enable_grad():
        leaves = [item.detach().requires_grad_() for item in values]
        output = attend(*leaves)
        return output.detach(), *torch.autograd.grad(output, leaves, weights)
