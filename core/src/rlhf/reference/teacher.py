"""A teacher's tokens compared with the policy's, and its most likely tokens on disk."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from attrs import evolve
from torch import Tensor

from rlhf.config.sections import Config, ModelConfig
from rlhf.config.source_names import check_model_folder
from rlhf.data.batch import PackedBatch
from rlhf.data.examples import Examples
from rlhf.engine import Engine
from rlhf.errors import RLHFError
from rlhf.model.architecture import read_architecture
from rlhf.model.head import Head
from rlhf.model.setting_names import name_in_errors, naming_model
from rlhf.model.tokenizer import read_tokenizer
from rlhf.readouts.distillation import COMPARED_ROWS

TEACHER = "teacher"
"""The role of a teacher's engine."""

SAME_TOKENIZER: WeakKeyDictionary[Any, set[ModelConfig]] = WeakKeyDictionary()
"""For a run's tokenizer, the teachers that have the same one: a run asks in its rehearsal and again
when it loads them, and reading a tokenizer takes 0.3 s."""


def shared_tokens(
    config: Config,
    model: ModelConfig,
    tokenizer: Any,
    examples: Sequence[Examples],
    *,
    top: int | None,
) -> int | None:
    """Return the number of tokens that both the policy and the teacher `model` predict; None if
    their heads have the same size.

    Heads of one tokenizer may be padded to different sizes. Reads configurations and tokenizers, no
    weights. Raises RLHFError for a teacher with another tokenizer, for examples with a token that
    it does not know, and unless there are more than `top` tokens.
    """
    name = name_in_errors(config, model, "path")
    check_model_folder(model.path, name)
    own = vocabulary_size(config)
    with naming_model(config, TEACHER, model):
        size = vocabulary_size(evolve(config, model=model))
    known = SAME_TOKENIZER.setdefault(tokenizer, set())
    if model not in known:
        check_tokenizer(config, tokenizer, model)
        known.add(model)
    for part in examples if size < own else ():
        if beyond := part.first_beyond(size):
            where, number = beyond
            raise RLHFError(
                f"{where}: {name} {model.path} has embeddings for {size:,} tokens but none for "
                f"{tokenizer.convert_ids_to_tokens(number)!r} ({number}); choose a teacher that "
                "knows all tokens of the rows"
            )
    shared = min(own, size)
    if top is not None and top >= shared:
        raise RLHFError(
            f"{config.trainer_name}.cache_top {top} must be less than the {shared} tokens of the "
            "vocabulary; lower it, or remove it to run the teacher alongside the policy"
        )
    return None if own == size else shared


def vocabulary_size(config: Config) -> int:
    """Return the number of tokens that the head of a configured model predicts."""
    return int(read_architecture(config).get_text_config().vocab_size)


def check_tokenizer(config: Config, tokenizer: Any, model: ModelConfig) -> None:
    """Raise RLHFError unless the tokenizer of the teacher `model` has the tokens and the merges of
    the policy's.

    What else a tokenizer does, such as adding BOS, differs within families. It does not matter,
    since the teacher reads the ids of the policy's tokenizer.
    """
    name = f"{name_in_errors(config, model, 'path')} {model.path}"
    try:
        teacher = read_tokenizer(model)
    except RLHFError as error:
        raise RLHFError(
            f"{name} has no readable tokenizer, which must be the policy's; add its files to the "
            "folder"
        ) from error
    numbers = {"token": tokens_of}
    # Only fast tokenizers show their merges, and 150,000 of them take 0.5 s to read.
    if tokenizer.is_fast and teacher.is_fast and model_of(tokenizer) != model_of(teacher):
        numbers["merge"] = merges_of
    for what, numbered in numbers.items():
        ours, other = numbered(tokenizer), numbered(teacher)
        differ = [n for n in sorted({*ours, *other}) if ours.get(n) != other.get(n)]
        if differ:
            number = differ[0]
            found, wanted = (
                repr(it[number]) if number in it else "missing" for it in (other, ours)
            )
            raise RLHFError(
                f"{name} has another tokenizer than the policy {config.model.path}: {what} "
                f"{number} is {found} instead of {wanted}; choose a teacher with the policy's "
                "tokenizer"
            )


def tokens_of(tokenizer: Any) -> Mapping[int, str]:
    """Return the tokens of a tokenizer by their ids."""
    return {number: token for token, number in tokenizer.get_vocab().items()}


def merges_of(tokenizer: Any) -> Mapping[int, Any]:
    """Return the pairs of tokens that a fast tokenizer merges by their rank; empty without any."""
    return dict(enumerate(json.loads(model_of(tokenizer)).get("merges") or ()))


def model_of(tokenizer: Any) -> bytes:
    """Return vocabulary and merges of a fast tokenizer as JSON."""
    state: bytes = tokenizer.backend_tokenizer.model.__getstate__()
    return state


def top_tokens(engine: Engine, batch: PackedBatch, *, top: int, temperature: float) -> Tensor:
    """Return what is stored of each prediction [N, 2 top + 1], float32: the `top` most likely token
    ids (exact in float32 up to 16 million), their log-probabilities, and that of all other tokens
    together. Collective if sharded."""

    def readout(hidden: Tensor, head: Head, batch: PackedBatch) -> dict[str, Tensor]:
        parts = hidden.index_select(0, batch.predict_from).split(COMPARED_ROWS)
        read = partial(_top, head=head, top=top, temperature=temperature)
        return {"top": torch.cat([read(part) for part in parts])}

    return engine(batch, readout)["top"]


def _top(hidden: Tensor, *, head: Head, top: int, temperature: float) -> Tensor:
    """Return what is stored of each prediction: hidden [n, H] -> [n, 2 top + 1]."""
    logprobs = head.logits(hidden).div_(temperature).log_softmax(-1)
    top_logprobs, tokens = logprobs.topk(top, dim=-1)
    rest = logprobs.scatter_(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([tokens.float(), top_logprobs, rest], dim=-1)
