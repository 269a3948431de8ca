"""The number of positions that a model supports."""

from typing import Any

from torch import nn

from rlhf.errors import RLHFError


def check_positions(causal: Any, longest: int, name: str) -> list[str]:
    """Return a line for the start of the run if the longest row exceeds the positions in the
    model's configuration. Raises RLHFError if positions come from a table, which ends there."""
    known = getattr(causal.config.get_text_config(), "max_position_embeddings", None)
    if known is None or longest <= known:
        return []
    what = f"{name} has {known:,} positions but the longest row has {longest:,} tokens"
    if _looked_up(causal, known):
        raise RLHFError(
            f"{what}; set data.max_tokens to {known} (data.too_long drops or cuts longer rows)"
        )
    return [
        f"positions  {what}: tokens past position {known:,} are outside the model's context and "
        "train poorly"
    ]


def _looked_up(causal: Any, known: int) -> bool:
    """Return whether an embedding has one row per position, or two more (OPT)."""
    tokens = causal.get_input_embeddings()
    tables = [part for part in causal.modules() if isinstance(part, nn.Embedding)]
    return any(part is not tokens and part.num_embeddings - known in (0, 1, 2) for part in tables)
