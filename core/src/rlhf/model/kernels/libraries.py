"""Which library computes attention of a row of long examples on CUDA in the place of our kernel:
FlashAttention 4, if it is installed, or cuDNN, each where it gives what our kernel gives."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.data.packing import Spans, blank_batch
from rlhf.errors import first_line
from rlhf.model.kernels.cudnn import long_examples
from rlhf.model.kernels.flash import flash_row
from rlhf.model.kernels.tree import Heads, Scoring, fused_tree
from rlhf.model.masks import Form, Tree, TreeMask

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
    """(query, key, value, tree, scale) -> output, of the shapes of `fused_tree`."""
    deterministic: bool
    """Whether its gradients can be the same in each run."""


LIBRARIES = {
    "flash": Library(
        lambda query, key, value, tree, scale: flash_row(query, key, value, tree.parts, scale),
        deterministic=True,
    ),
    "cudnn": Library(
        lambda query, key, value, tree, scale: long_examples(query, key, value, tree.sizes, scale),
        deterministic=False,
    ),
}

KINDS: set[Heads] = set()
"""The kinds of attention that have run on CUDA and that libraries may compute."""

AGREES: dict[tuple[str, Heads, Form, torch.device], bool] = {}
"""What `agrees` has returned."""


def choose_libraries(tree: Tree) -> dict[Heads, str]:
    """Return the library that computes a row, by the kind of attention. Kinds that have not run
    yet, and those for which no library agrees with our kernel, are left out."""
    if tree.owner.is_meta:
        return {}
    deterministic = torch.are_deterministic_algorithms_enabled()
    names = [name for name in tree.libraries if LIBRARIES[name].deterministic or not deterministic]
    chosen = {}
    for kind in KINDS:
        for name in names:
            if agrees(name, kind, tree.form, tree.owner.device):
                chosen[kind] = name
                break
    return chosen


def agrees(name: str, kind: Heads, form: Form, device: torch.device) -> bool:
    """Return whether a library runs here and gives the values and gradients of our kernel on a row
    of random examples."""
    key = name, kind, form, device
    if key not in AGREES:
        problem = disagreement(name, kind, PROBED[form], device)
        AGREES[key] = problem is None
        if problem is not None and name == "flash":  # It was installed to be used.
            warnings.warn(f"FlashAttention 4 is not used, since it {problem}", stacklevel=2)
    return AGREES[key]


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
    mask = TreeMask(Tree(batch, libraries=(name,)), None)
    library = partial(LIBRARIES[name].attend, tree=mask.tree, scale=kind.scale)
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
