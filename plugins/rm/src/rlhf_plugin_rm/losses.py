"""Losses of reward models: pure functions of the rewards of a prompt's answers.

Rewards and ranks are [E, K]: a row for each example, as long as the longest list of answers.
`ranks` has the lower number for the better answer, and nan where an answer is missing.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(difference: Tensor, margin: Tensor) -> Tensor:
    """Return -log sigmoid(r_better - r_worse - margin), elementwise; ln 2 at zero.

    Bradley and Terry 1952; InstructGPT (arXiv 2203.02155) equation 1, with the margin of Llama 2
    (arXiv 2307.09288) equation 2.
    """
    return -logsigmoid(difference - margin)


def pair_weights(ranks: Tensor) -> Tensor:
    """Return the weight [E, K, K] of each ordered pair from ranks [E, K].

    At [e, i, j] it is one over the number of pairs of example e if answer i is better than j, else
    0. Without ties that is 1 / C(k, 2) (InstructGPT, arXiv 2203.02155, equation 1): an example
    counts once, however many answers it has.
    """
    better = (ranks[:, :, None] < ranks[:, None, :]).float()
    return better / better.sum((1, 2), keepdim=True).clamp_min(1)


def differences(rewards: Tensor) -> Tensor:
    """Return reward i minus reward j at [e, i, j], from rewards [E, K]."""
    return rewards[:, :, None] - rewards[:, None, :]


def centring(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean [E] of (r_better + r_worse)^2 over the pairs of each example.

    It determines the constant that preferences leave open (arXiv 2312.09244, section 3).
    """
    sums = rewards[:, :, None] + rewards[:, None, :]
    return (weights * sums.square()).sum((1, 2))


def plackett_luce(rewards: Tensor, ranks: Tensor, margin: Tensor) -> Tensor:
    """Return the negative log-likelihood [E] of each example's order: the sum over answers i of
    log sum_j exp(r_j + margin [j != i]) - r_i, over all j that are not better than i.

    Plackett 1975, Luce 1959; each of several equal ranks is drawn before the others (Breslow's
    form). With two answers it is `bradley_terry`. `margin` [E] is added to the rewards of the
    answers that were not chosen.
    """
    others = 1 - torch.eye(rewards.shape[1], device=rewards.device)
    behind = ranks[:, :, None] <= ranks[:, None, :]
    behind = behind | (others == 0)
    left = rewards[:, None, :] + margin[:, None, None] * others
    total = left.masked_fill(~behind, -torch.inf).logsumexp(-1)
    return ((total - rewards) * ~ranks.isnan()).sum(1)
