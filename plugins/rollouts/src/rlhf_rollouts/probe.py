"""Whether rows compute what a model computes, tried on a few tokens before its first answer."""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor
from transformers import Cache

from rlhf.engine import Engine, Mesh
from rlhf.errors import RLHFError, first_line
from rlhf_rollouts.attention import attention_of_rows
from rlhf_rollouts.cache import Cursor, RowCache, has_states, prompt_cache, unsupported_layers
from rlhf_rollouts.decoder import Forward

PREFIXES = 8, 5, 0
"""Tokens of each row that are computed as its prompt."""
STEPS = 4
TOLERANCE = {"fp32": 1e-3, "fp16": 5e-2, "bf16": 2e-1}
"""The largest distance of logits, relative to their spread; wrong ones are about 1 apart."""


@frozen
class Verdict:
    """What a probe has found."""

    prompts: Cache | None
    """Prompts in the cache of the model, whose layers show its shapes; None if rows do not support
    the model."""
    reason: str = ""
    """Why not."""


def examine(engine: Engine, prompt: Sequence[int], mesh: Mesh) -> Verdict:
    """Compare decode steps over the tokens of `prompt` with a plain forward. Collective."""
    causal = engine.module.causal
    forward = Forward(engine.module.model, causal)
    if not forward.takes_cache:
        return Verdict(None, "it takes no cache")
    if names := unsupported_layers(causal):
        return Verdict(None, f"it keeps {', '.join(names)}")
    if not causal._can_set_attn_implementation():
        return Verdict(None, "its attention cannot be replaced")
    length = max(PREFIXES) + STEPS
    text = (list(prompt) * length)[:length]
    rows = torch.tensor([text, text[::-1], text[1:] + text[:1]], device=engine.device)
    expected = forward.plain(rows)
    prompts, distance, problem = prompt_cache(causal), torch.inf, ""
    try:
        with attention_of_rows(causal):
            prompts, found = stepwise(forward, rows)
        distance = distance_of(found, expected)
    except Exception as error:  # The code of a model's family may expect other caches and masks.
        problem = f"{type(error).__name__}: {first_line(error)}"
        if engine.sharded and forward.stopped:
            # A forward that has stopped halfway leaves gathered weights behind.
            raise RLHFError(
                f"{type(causal).__name__} fails with {problem} when it writes answers in rows, and "
                "weights divided among ranks rule out another try; choose another rollouts.engine"
            ) from error
    worst = mesh.max(torch.tensor(distance, device=engine.device)).item()
    if worst <= TOLERANCE[engine.precision]:
        return Verdict(prompts)
    return Verdict(None, problem or f"its steps were off by {worst:.1e}")


def stepwise(forward: Forward, rows: Tensor) -> tuple[Cache, Tensor]:
    """Return the cache of the prompts in `rows` [n, T], and the logits of the steps after them
    [n, STEPS, V]."""
    device, lengths = rows.device, torch.tensor(PREFIXES, device=rows.device)
    texts = [row[:size].tolist() for row, size in zip(rows, PREFIXES, strict=True)]
    pad = int(rows[0, 0])
    prompts = forward.read(texts, pad, device)
    cache = RowCache(prompts, Cursor(lengths.clone()), *rows.shape)
    places = torch.arange(len(rows), device=device)
    if has_states(prompts):
        for place, text in zip(places, texts, strict=True):
            own = forward.read([text], pad, device)
            place = place[None]
            cache.put(place, own, torch.zeros_like(place), lengths[place])
    else:
        cache.put(places, prompts, places, lengths)
    cache.cursor.used = rows.shape[1]
    logits = []
    for _ in range(STEPS):
        positions = cache.cursor.positions
        tokens = rows[places, positions]
        logits.append(forward(tokens[:, None], positions[:, None], cache))
        positions += 1
    return prompts, torch.stack(logits, 1)


def distance_of(found: Tensor, expected: Tensor) -> float:
    """Return how far the logits of steps [n, STEPS, V] are from those of whole rows [n, T, V],
    relative to their spread: the median of a row's steps, since experts are chosen anew where two
    are nearly equal, and the worst of all rows."""
    starts = torch.tensor(PREFIXES, device=found.device)[:, None]
    steps = starts + torch.arange(STEPS, device=found.device)
    plain = expected[torch.arange(len(found), device=found.device)[:, None], steps].float()
    spread = (plain - plain.mean(-1, keepdim=True)).norm(dim=-1)
    distance = (found.float() - plain).norm(dim=-1) / spread.clamp(min=1e-12)
    return float(distance.nan_to_num(nan=torch.inf).median(1).values.max())
