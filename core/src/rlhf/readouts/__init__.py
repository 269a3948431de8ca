"""What is read of hidden states inside an engine's forward: log-probabilities and scores.

Public: trainers of third parties import from here, and scorers import `exported_model`. A readout
is a function `readout(hidden [T, H], head, batch) -> {name: tensor}`.
"""

from rlhf.model.accelerated import kernel
from rlhf.model.exported import exported_model
from rlhf.model.extra import exported_extra
from rlhf.model.head import Head
from rlhf.readouts.chunked import chunked_sum, predictions
from rlhf.readouts.logits import pad_rows, transformed
from rlhf.readouts.logprobs import (
    answer_logprobs,
    hidden_at,
    scores,
    summed_logprobs,
    token_logprobs,
    token_scores,
)

__all__ = [
    "Head",
    "answer_logprobs",
    "chunked_sum",
    "exported_extra",
    "exported_model",
    "hidden_at",
    "kernel",
    "pad_rows",
    "predictions",
    "scores",
    "summed_logprobs",
    "token_logprobs",
    "token_scores",
    "transformed",
]
