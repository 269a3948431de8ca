"""How far a model's positions reach."""

from typing import Any

from torch import nn

from rlhf.errors import RLHFError


def check_positions(causal: Any, longest: int, name: str) -> list[str]:
    """A line where the longest row goes on behind the positions that the model's configuration
    knows; RLHFError where these are looked up in a table, which ends there."""
    known = getattr(causal.config.get_text_config(), "max_position_embeddings", None)
    if known is None or longest <= known:
        return []
    what = f"{name} knows {known:,} positions but the longest row has {longest:,} tokens"
    if _looked_up(causal, known):
        raise RLHFError(
            f"{what}: set data.max_tokens to {known} (data.too_long says what becomes of the rest)"
        )
    return [f"positions  {what}: what stands behind is learnt less well"]


def _looked_up(causal: Any, known: int) -> bool:
    """Whether a table has one row per position: as many, or two more (OPT)."""
    tokens = causal.get_input_embeddings()
    tables = [part for part in causal.modules() if isinstance(part, nn.Embedding)]
    return any(part is not tokens and part.num_embeddings - known in (0, 1, 2) for part in tables)
