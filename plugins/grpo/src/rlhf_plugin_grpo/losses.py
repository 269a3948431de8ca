"""The loss of each predicted token. N predictions, A answers; log-probabilities are in float32.

`logprobs` [N] is the policy now, `old` [N] the policy that wrote the answers, without gradient.
"""

import torch
from torch import Tensor

from rlhf_plugin_grpo.config import Clip
from rlhf_plugin_grpo.presets import Method
from rlhf_rollouts.ratios import clipped_gains


def ratios(logprobs: Tensor, old: Tensor, answer: Tensor, num_answers: int, *, of: str) -> Tensor:
    """Return the ratio of probabilities for each prediction [N].

    token: r = exp(logprobs - old). sequence: s = exp(mean of logprobs - old over the answer), GSPO
    (arXiv 2507.18071 eq. 7), the same for all predictions of an answer; its gradient goes through
    all of them.
    """
    difference = logprobs - old
    if of == "sequence":
        difference = mean_per_answer(difference, answer, num_answers)[answer]
    return difference.exp()


def surrogate(
    ratio: Tensor, logprobs: Tensor, advantages: Tensor, method: Method, clip: Clip
) -> Tensor:
    """Return the negative gain of each prediction [N].

    ppo, in GRPO (arXiv 2402.03300 eq. 3) and with two bounds in DAPO (arXiv 2503.14476 eq. 8):
    -min(r A, clip(r, 1 - low, 1 + high) A), and with `dual` at most -dual A for A < 0 (arXiv
    1912.09729). cispo: -sg(min(r, 1 + high)) A log p (arXiv 2506.13585 eq. 4). none: -r A.
    """
    if method.clip_kind == "cispo":
        weight = ratio.detach().clamp(max=1 + method.clip_high)
        return -weight * advantages * logprobs
    if method.clip_kind == "none":
        return -ratio * advantages
    low, high = method.clip_low, method.clip_high
    return -clipped_gains(ratio, advantages, low=low, high=high, dual=clip.dual)


def divergence(logprobs: Tensor, old: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Return an addend of KL(policy || reference) for each prediction [N], whose mean over answers
    that `old` has written has the gradient of the divergence.

    With d = logprobs - reference and r = exp(logprobs - old): k3 is r (exp(-d) - 1 + d), whose mean
    is the divergence for any policy, so that its gradient is right (as in DeepSeek-V3.2, arXiv
    2512.02556); k2 is sg(r) d^2 / 2, whose gradient is r d times that of logprobs. Without r, k3
    has another gradient, and that of k1, d, is 0 in the mean.
    """
    difference, ratio = logprobs - reference, (logprobs - old).exp()
    if estimator == "k2":
        return ratio.detach() * difference.square() / 2
    return ratio * (torch.exp(-difference) - 1 + difference)


def mean_per_answer(values: Tensor, answer: Tensor, num_answers: int) -> Tensor:
    """Return the mean of the values [N] over the predictions of each answer [A]; 0 for an answer
    without any."""
    zeros = values.new_zeros(num_answers)
    counts = zeros.index_add(0, answer, torch.ones_like(values))
    return zeros.index_add(0, answer, values) / counts.clamp(min=1)
