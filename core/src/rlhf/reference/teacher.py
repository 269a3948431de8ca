"""A teacher's tokens compared with the policy's, and its most likely tokens on disk."""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from attrs import evolve
from torch import Tensor

from rlhf.config.sections import Config, ModelConfig
from rlhf.config.source_names import check_model_folder
from rlhf.data.batch import PackedBatch
from rlhf.engine import Engine
from rlhf.errors import RLHFError
from rlhf.model.architecture import read_architecture
from rlhf.model.head import Head
from rlhf.model.setting_names import name_in_errors, naming_model
from rlhf.model.tokenizer import read_tokenizer
from rlhf.readouts.distillation import COMPARED_ROWS

TEACHER = "teacher"
"""The role of a teacher's engine."""

SAME_TOKENS: WeakKeyDictionary[Any, set[ModelConfig]] = WeakKeyDictionary()
"""For a run's tokenizer, the teachers that have its tokens: a run asks in its rehearsal and again
when it loads them, and reading a tokenizer takes 0.3 s."""


def check_teacher(config: Config, model: ModelConfig, tokenizer: Any, *, top: int | None) -> None:
    """Raise RLHFError unless `model` predicts the policy's tokens, more than `top` of them. Reads
    configurations and tokenizers, no weights."""
    policy = config.model.path
    size = read_architecture(config).get_text_config().vocab_size
    with naming_model(config, TEACHER, model):
        check_model_folder(model.path, name_in_errors(config, model, "path"))
        teachers = read_architecture(evolve(config, model=model)).get_text_config().vocab_size
        if size != teachers:
            raise RLHFError(
                f"model.path {model.path} has {teachers} tokens but the policy {policy} has "
                f"{size}; choose a teacher with the policy's vocabulary"
            )
    known = SAME_TOKENS.setdefault(tokenizer, set())
    if model not in known:
        check_tokens(config, tokenizer, model, size)
        known.add(model)
    if top is not None and top >= size:
        raise RLHFError(
            f"{config.trainer_name}.cache_top {top} must be less than the {size} tokens of the "
            "vocabulary; lower it, or remove it to run the teacher alongside the policy"
        )


def check_tokens(config: Config, tokenizer: Any, model: ModelConfig, size: int) -> None:
    """Raise RLHFError unless the tokenizer of `model` has the tokens of the policy's, both for
    `size` logits."""
    with naming_model(config, TEACHER, model):
        ours, other = tokenizer.get_vocab(), read_tokenizer(model).get_vocab()
        if differ := sorted(ours.items() ^ other.items(), key=lambda item: (item[1], item[0])):
            token, number = differ[0]
            raise RLHFError(
                f"model.path {model.path} has different tokens than the policy "
                f"{config.model.path}, although both have {size} (the first is {token!r}, "
                f"{number}); choose a teacher with the policy's tokenizer"
            )


def top_tokens(engine: Engine, batch: PackedBatch, *, top: int, temperature: float) -> Tensor:
    """Return what is stored of each prediction [N, 2 top + 1], float32: the `top` most likely token
    ids (exact in float32 up to 16 million), their log-probabilities, and that of all other tokens
    together. Collective at stage 3."""

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
