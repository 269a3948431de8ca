"""What is read of hidden states inside an engine's forward: log-probabilities, scores, divergences.

Public: trainers of third parties import from here, and scorers import `exported_model`. A readout
is a function `readout(hidden [T, H], head, batch) -> {name: tensor}`.
"""

from rlhf.model.exported import exported_model
from rlhf.model.extra import exported_extra
from rlhf.model.head import Head
from rlhf.readouts.chunked import chunked_sum, predictions
from rlhf.readouts.distillation import Mixture, beside, distil, divergence
from rlhf.readouts.logprobs import (
    answer_logprobs,
    hidden_at,
    scores,
    summed_logprobs,
    token_logprobs,
    token_scores,
)
from rlhf.readouts.measures import SkewedKL
from rlhf.readouts.teachers import Measure, Teacher, TopTeacher, WholeTeacher

__all__ = [
    "Head",
    "Measure",
    "Mixture",
    "SkewedKL",
    "Teacher",
    "TopTeacher",
    "WholeTeacher",
    "answer_logprobs",
    "beside",
    "chunked_sum",
    "distil",
    "divergence",
    "exported_extra",
    "exported_model",
    "hidden_at",
    "predictions",
    "scores",
    "summed_logprobs",
    "token_logprobs",
    "token_scores",
]
