"""A teacher beside the policy or on disk, and its tokens compared with the policy's."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from attrs import fields_dict, has
from torch import Tensor

from rlhf.engine import Engine
from rlhf.errors import RLHFError
from rlhf.plugin import Config, ModelConfig
from rlhf.readouts import Head
from rlhf.trainer import PackedBatch, Run
from rlhf_distill.distillation import COMPARED_ROWS
from rlhf_distill.distributions import TEACHER

SAME_TOKENIZER: WeakKeyDictionary[Any, set[ModelConfig]] = WeakKeyDictionary()
"""For a run's tokenizer, the teachers that have the same one: a run asks in its rehearsal and again
when it loads them, and reading a tokenizer takes 0.3 s."""


def load_teacher(
    run: Run, model: ModelConfig, *, top: int | None = None, temperature: float = 1.0
) -> Engine | None:
    """Load `model`, a causal language model with the policy's tokenizer, as a frozen engine.
    Collective. Raises RLHFError for another tokenizer, before any weight is read.

    The heads of both may be padded to different sizes. Then every language model of the run
    predicts, and answers consist of, only the tokens of the smaller head.

    With `top` it runs once over the data, unless its results are on disk, and is released. Each
    batch then holds its `top` most likely tokens per prediction at `temperature`, as
    `TopTeacher.of(batch, top)`; the return value is None.
    """
    tokens = shared_tokens(run, model, top=top)
    if tokens is not None:
        run.limit_tokens(tokens)
        run.notes.append(
            f"tokens     the first {tokens:,}, which policy and teacher both predict; "
            "their heads have different sizes"
        )
    if top is None:
        engine = run.load(TEACHER, model=model, trained=False)
        size = run.shape(TEACHER).parameters
        run.notes.append(f"teacher    {model.path}: {size:,} parameters, frozen")
        return engine
    compute = partial(top_tokens, top=top, temperature=temperature)
    key = f"top{top}-temperature{temperature:g}"
    done = run.attach(TEACHER, model, compute, key=key, width=2 * top + 1)
    run.notes.append(f"teacher    its {top} most likely tokens: {done}")
    return None


def shared_tokens(run: Run, model: ModelConfig, *, top: int | None) -> int | None:
    """Return the number of tokens that both the policy and the teacher `model` predict; None if
    their heads have the same size.

    Heads of one tokenizer may be padded to different sizes. Reads configurations and tokenizers, no
    weights. Raises RLHFError for a teacher with another tokenizer, for examples with a token that
    it does not know, and unless there are more than `top` tokens.
    """
    own = vocabulary_size(run.load_architecture())
    size = vocabulary_size(run.load_architecture(TEACHER, model=model))
    known = SAME_TOKENIZER.setdefault(run.tokenizer, set())
    if model not in known:
        check_tokenizer(run, model)
        known.add(model)
    for part in run.examples if size < own else ():
        if beyond := part.first_beyond(size):
            where, number = beyond
            raise RLHFError(
                f"{where}: {named(run.config, model)} has embeddings for {size:,} tokens but none "
                f"for {run.tokenizer.convert_ids_to_tokens(number)!r} ({number}); choose a teacher "
                "that knows all tokens of the rows"
            )
    shared = min(own, size)
    if top is not None and top >= shared:
        raise RLHFError(
            f"{run.config.trainer_name}.cache_top {top} must be less than the {shared} tokens of "
            "the vocabulary; lower it, or remove it to run the teacher alongside the policy"
        )
    return None if own == size else shared


def vocabulary_size(architecture: Any) -> int:
    """Return the number of tokens that the head of a model predicts."""
    return int(architecture.get_text_config().vocab_size)


def named(config: Config, model: ModelConfig) -> str:
    """Return what errors call a teacher: the trainer's setting that has its folder, and the
    folder."""
    section = getattr(config, config.trainer_name)
    settings = fields_dict(type(section)) if has(type(section)) else ()
    of_folder = (name for name in settings if getattr(section, name) == model.path)
    setting = next((f"{config.trainer_name}.{name}" for name in of_folder), "the teacher")
    return f"{setting} {model.path}"


def check_tokenizer(run: Run, model: ModelConfig) -> None:
    """Raise RLHFError unless the tokenizer of the teacher `model` has the tokens and the merges of
    the policy's.

    What else a tokenizer does, such as adding BOS, differs within families. It does not matter,
    since the teacher reads the ids of the policy's tokenizer.
    """
    name, tokenizer = named(run.config, model), run.tokenizer
    try:
        teacher = run.load_tokenizer(model)
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
                f"{name} has another tokenizer than the policy {run.config.model.path}: {what} "
                f"{number} is {found} instead of {wanted}; choose a teacher with the policy's "
                "tokenizer (docs/kd.md shows what another one can do)"
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
