"""What is read off hidden states in an engine's forward: log-probabilities, scores, divergences.

Public: third parties import from here.
"""

from rlhf.model.head import Head
from rlhf.readouts.divergence import (
    Measure,
    Mixture,
    Teacher,
    WholeTeacher,
    distil,
    divergence,
)
from rlhf.readouts.logprobs import (
    Gradients,
    answer_logprobs,
    hidden_at,
    predictions,
    scaled_by,
    scores,
    summed_logprobs,
    token_logprobs,
    token_scores,
)

__all__ = [
    "Gradients",
    "Head",
    "Measure",
    "Mixture",
    "Teacher",
    "WholeTeacher",
    "answer_logprobs",
    "distil",
    "divergence",
    "hidden_at",
    "predictions",
    "scaled_by",
    "scores",
    "summed_logprobs",
    "token_logprobs",
    "token_scores",
]
