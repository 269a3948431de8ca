"""Losses of reward models: pure functions of the rewards of a prompt's answers.

Answers stand in rows [E, K], one for each example, filled up to the longest list. `ranks` [E, K]
has the lower number for the better answer and nan where there is no answer.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(difference: Tensor, margin: Tensor) -> Tensor:
    """-log sigmoid(r_better - r_worse - margin), elementwise; ln 2 at zero.

    Bradley and Terry 1952; InstructGPT (arXiv 2203.02155) equation 1, with the margin of Llama 2
    (arXiv 2307.09288) equation 2.
    """
    return -logsigmoid(difference - margin)


def log_exp(difference: Tensor, margin: Tensor) -> Tensor:
    """log(1 + exp(r_worse - r_better + margin)), elementwise, without ever forming the
    exponential of a large number. Equal to `bradley_terry`."""
    exponent = margin - difference
    return torch.logaddexp(exponent, torch.zeros_like(exponent))


def pair_weights(ranks: Tensor) -> Tensor:
    """ranks [E, K] -> [E, K, K]: at [e, i, j] one over the example's number of pairs where i is
    better than j, else 0: 1 / C(k, 2) without ties (InstructGPT, arXiv 2203.02155, equation 1),
    so that an example counts once however many answers it has."""
    better = (ranks[:, :, None] < ranks[:, None, :]).float()
    return better / better.sum((1, 2), keepdim=True).clamp_min(1)


def differences(rewards: Tensor) -> Tensor:
    """rewards [E, K] -> [E, K, K]: reward i minus reward j."""
    return rewards[:, :, None] - rewards[:, None, :]


def centring(rewards: Tensor, weights: Tensor) -> Tensor:
    """Of each example [E] the weighted mean over its pairs of (r_better + r_worse)^2 (arXiv
    2312.09244, section 3: it fixes the constant that preferences leave open)."""
    sums = rewards[:, :, None] + rewards[:, None, :]
    return (weights * sums.square()).sum((1, 2))


def plackett_luce(rewards: Tensor, ranks: Tensor, margin: Tensor) -> Tensor:
    """Of each example [E] the negative log-likelihood of its order: the sum over answers i of
    log sum_j exp(r_j + margin [j != i]) - r_i over all j that are not better than i.

    Plackett 1975, Luce 1959; of equal ranks each is drawn before the others (Breslow's form). With
    two answers it is `bradley_terry`. `margin` [E] is added to the answers that were not chosen.
    """
    others = 1 - torch.eye(rewards.shape[1], device=rewards.device)
    behind = ranks[:, :, None] <= ranks[:, None, :]
    behind = behind | (others == 0)
    left = rewards[:, None, :] + margin[:, None, None] * others
    total = left.masked_fill(~behind, -torch.inf).logsumexp(-1)
    return ((total - rewards) * ~ranks.isnan()).sum(1)
