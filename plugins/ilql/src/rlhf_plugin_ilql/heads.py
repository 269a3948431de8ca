"""The heads: Q for each token of the vocabulary, target heads that follow them, and V.

Each has a hidden layer of twice the model's width, as in trlX. A product with the vocabulary is
needed for the conservative term only, and core computes it in chunks; everywhere else Q is needed
for one token, which takes one row of the head.
"""

from collections.abc import Iterable, Mapping

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, relu

from rlhf.readouts import Head, summed_logprobs, token_logprobs
from rlhf.trainer import Average, PackedBatch
from rlhf_plugin_ilql.config import ILQLConfig

Q_NAMES = ("q0", "q1")
TARGET = "target_"
"""Prefix of the names of target heads."""


def q_names(config: ILQLConfig) -> tuple[str, ...]:
    """Return the names of the Q heads of a run."""
    return Q_NAMES if config.two_qs else Q_NAMES[:1]


def first_values(
    config: ILQLConfig, *, width: int, vocabulary: int, seed: int, meta: bool
) -> dict[str, Tensor | Average]:
    """Return the parameters of all heads over hidden states of `width`, drawn from `seed` as
    torch's linear layers are; on the meta device without values."""
    values: dict[str, Tensor | Average] = {}
    with torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
        torch.manual_seed(seed)
        for name, size in {"v": 1, **dict.fromkeys(q_names(config), vocabulary)}.items():
            layers = {"in": nn.Linear(width, 2 * width), "out": nn.Linear(2 * width, size)}
            for place, layer in layers.items():
                for kind, value in layer.named_parameters():
                    values[f"{name}_{place}_{kind}"] = value.detach()
    targets = {
        TARGET + name: Average(
            value=value, of=name, share=config.alpha, every=config.steps_for_target_q_sync
        )
        for name, value in values.items()
        if isinstance(value, Tensor) and name.startswith("q")
    }  # fmt: skip
    return values | targets


def read_heads(
    hidden: Tensor, head: Head, batch: PackedBatch, *, names: Iterable[str]
) -> dict[str, Tensor]:
    """Read for the N predictions `logprobs` and `v` [N], and of each of the Q heads in `names`: its
    value of the predicted token `q...` [N], the sum of the cross entropy of its softmax
    `cross_entropy/...`, and the value of its target head `target_q...` [N], without gradient."""
    extra, tokens = head.extra, batch.predict
    states = hidden.index_select(0, batch.predict_from)
    own = attrs.evolve(batch, predict_from=torch.arange(len(states), device=states.device))
    inner = inner_layer(states, extra, "v")
    found = {
        "logprobs": token_logprobs(hidden, head, batch)["logprobs"],
        "v": value_of(torch.zeros_like(tokens), inner, extra, "v"),
    }
    for name in names:
        inner = inner_layer(states, extra, name)
        found[name] = value_of(tokens, inner, extra, name)
        weight, bias = extra[f"{name}_out_weight"], extra[f"{name}_out_bias"]
        of_q = Head(weight=weight, bias=bias, sequence=head.sequence)
        found[f"cross_entropy/{name}"] = -summed_logprobs(inner, of_q, own)["sum"]
        with torch.no_grad():
            target = TARGET + name
            inner = inner_layer(states, extra, target)
            found[target] = value_of(tokens, inner, extra, target)
    return found


def inner_layer(states: Tensor, extra: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the hidden layer [N, 2 H] of a head over hidden states [N, H], in the head's dtype."""
    weight = extra[f"{name}_in_weight"]
    return relu(linear(states.to(weight.dtype), weight, extra[f"{name}_in_bias"]))


def value_of(tokens: Tensor, inner: Tensor, extra: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a head's values [N] of one token each, from its hidden layer [N, 2 H], in float32."""
    # On CUDA the gradient of an embedding does not depend on the order of threads.
    rows = embedding(tokens, extra[f"{name}_out_weight"])
    bias = embedding(tokens, extra[f"{name}_out_bias"][:, None])
    return (inner.float() * rows.float()).sum(-1) + bias.float().squeeze(-1)
