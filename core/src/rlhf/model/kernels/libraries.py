"""Which library computes attention of a row of long examples on CUDA in the place of our kernel:
FlashAttention 4, if it is installed, or cuDNN, each where it gives what our kernel gives."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.data.packing import blank_batch
from rlhf.errors import first_line
from rlhf.model.kernels.cudnn import long_examples
from rlhf.model.kernels.flash import flash_row
from rlhf.model.kernels.tree import Heads, Scoring, fused_tree
from rlhf.model.masks import Tree, TreeMask

AGREEMENT = 2e-2
"""Largest accepted error, as a share of the norm: rounding to bf16 gives 4e-3."""

PROBED = {False: ((0, (700,)), (80, (500,))), True: ((300, (500,)), (200, (150, 130)))}
"""Prompts and answers on which a library is compared with our kernel, without and with a shared
prompt."""


class Library(NamedTuple):
    """Attention of a row by a library."""

    name: str
    attend: Callable[..., Tensor]
    """(query, key, value, tree, scale) -> output, as `fused_tree`."""
    fixed: bool
    """Whether its gradients can be the same in each run."""


LIBRARIES = {
    "flash": Library(
        "FlashAttention 4",
        lambda query, key, value, tree, scale: flash_row(query, key, value, tree.parts, scale),
        fixed=True,
    ),
    "cudnn": Library(
        "cuDNN's attention",
        lambda query, key, value, tree, scale: long_examples(query, key, value, tree.sizes, scale),
        fixed=False,
    ),
}

KINDS: set[Heads] = set()
"""The kinds of attention that have run on CUDA and that libraries may compute."""

AGREES: dict[tuple[str, Heads, bool], bool] = {}
"""What `agrees` has found."""


def choose(kind: Heads, mask: TreeMask, scoring: Scoring) -> str | None:
    """Return the name of the library that computes a row, None for our kernel."""
    if scoring.softcap is not None or scoring.sinks is not None or scoring.dropout:
        return None
    # What is compiled reads what `settle` has found.
    if not torch.compiler.is_compiling() and not mask.windowed:
        KINDS.add(kind)
        settle(mask)
    fixed = torch.are_deterministic_algorithms_enabled()
    for name in mask.libraries:
        if AGREES.get((name, kind, mask.tree.shared), False) and not (
            fixed and not LIBRARIES[name].fixed
        ):
            return name
    return None


def settle(mask: TreeMask) -> None:
    """Compare the libraries that may compute a row with our kernel, up to the first that agrees."""
    for kind in KINDS:
        for name in mask.libraries:
            if agrees(name, kind, shared=mask.tree.shared):
                break


def agrees(name: str, kind: Heads, *, shared: bool) -> bool:
    """Return whether a library runs here and gives the values and gradients of our kernel on random
    examples, with a `shared` prompt or without."""
    key = name, kind, shared
    if key not in AGREES:
        AGREES[key] = _agrees(*key)
    return AGREES[key]


def _agrees(name: str, kind: Heads, shared: bool) -> bool:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (
        (kind.heads, kind.width), (kind.key_heads, kind.width), (kind.key_heads, kind.of_value),
        (kind.heads, kind.of_value),
    )  # fmt: skip
    spans = PROBED[shared]
    num_tokens = sum(prompt + sum(answers) for prompt, answers in spans)
    query, key, value, weights = (
        torch.randn(
            1, num_tokens, *shape, generator=generator, device="cuda", dtype=kind.dtype
        ).transpose(1, 2)
        for shape in shapes
    )
    batch = blank_batch(torch.zeros(num_tokens, dtype=torch.long, device="cuda"), spans)
    mask = TreeMask(Tree(batch, libraries=(name,)), None)
    library = LIBRARIES[name]
    ways = (
        partial(library.attend, tree=mask.tree, scale=kind.scale),
        partial(fused_tree, mask=mask, scoring=Scoring(0.0, kind.scale, None, None)),
    )
    try:
        theirs, ours = (values_and_gradients(way, query, key, value, weights) for way in ways)
    except ImportError:
        return False
    except Exception as error:  # No such kernel for this device or version, in its own words.
        warnings.warn(f"{library.name} does not run here: {first_line(error)}", stacklevel=2)
        return False
    errors = [(a - b).norm() / b.norm() for a, b in zip(theirs, ours, strict=True)]
    return bool(torch.stack(errors).max() < AGREEMENT)


def values_and_gradients(attend: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the output of `attend` on query, key and value, and their gradients for the weights of
    the last input."""
    *values, weights = inputs
    with torch.enable_grad():
        leaves = [item.detach().requires_grad_() for item in values]
        output = attend(*leaves)
        return output.detach(), *torch.autograd.grad(output, leaves, weights)
