"""Prompts with images in a batch of transformers' `generate`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf.rollouts import pack
from rlhf.trainer import Example
from rlhf_rollouts.decoder import Start

OF_TOKENS = ("mm_token_type_ids", "token_type_ids")
"""Inputs that describe tokens."""
POSITIONS = "position_ids"
"""An input that a model computes itself while it generates."""


def has_images(answer: Start) -> bool:
    """Return whether the prompt of an answer has images."""
    names = answer.inputs.keys() - {*OF_TOKENS, POSITIONS}
    return any(len(answer.inputs[name]) for name in names)


def with_image(answers: Sequence[Start], group: Sequence[int]) -> list[int]:
    """Return the numbers of a group of answers, with one more if only others have images: ranks
    that divide weights wait for one another in the layers that compute images."""
    if any(has_images(answers[number]) for number in group):
        return [*group]
    others = (number for number, answer in enumerate(answers) if has_images(answer))
    added = min(others, key=lambda number: len(answers[number].prompt), default=None)
    return [*group] if added is None else [*group, added]


def inputs_of(answers: Sequence[Start], causal: Any, device: torch.device) -> dict[str, Tensor]:
    """Return the keyword arguments of `generate` for prompts that are padded on the left: images in
    the order of the prompts, and what describes the tokens [prompts, T]."""
    examples = [Example(one.prompt, [], inputs=one.inputs) for one in answers]
    found = {}
    for name, value in pack(examples, range(len(examples))).inputs.items():
        if name in OF_TOKENS:
            rows = value.split([len(one.prompt) for one in answers])
            value = pad_sequence(rows, batch_first=True, padding_side="left")
        if name != POSITIONS:
            found[name] = value.to(device, causal.dtype if value.is_floating_point() else None)
    return found


def placeholder_of(causal: Any) -> int | None:
    """Return the token that stands for an image in the input of a model."""
    names = ("image_token_id", "image_token_index")
    found = (getattr(causal.config, name, None) for name in names)
    return next((int(token) for token in found if token is not None), None)
