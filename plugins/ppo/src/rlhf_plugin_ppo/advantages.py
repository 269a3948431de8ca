"""From the rewards of answers to advantages: on the host, in float64, over the whole rollout.

Matrices [answers, T] have a number for each token of an answer, and nan for what is not predicted:
tokens of a tool, or what is behind the end of a shorter answer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
EPSILON = 1e-8
"""Added to a variance, as in TRL and OpenRLHF."""
LARGEST_ERROR = 0.2
"""Largest relative error by which the coefficient of KL is changed (arXiv 1909.08593)."""


def matrix_of(groups: Sequence[Sequence[Any]]) -> Matrix:
    """Return the numbers per token of all answers [answers, T]."""
    rows = [np.asarray(row, np.float64) for group in groups for row in group]
    matrix = np.full((len(rows), max(map(len, rows))), np.nan)
    for place, row in enumerate(rows):
        matrix[place, : len(row)] = row
    return matrix


def token_rewards(scores: Matrix, log_ratios: Matrix, beta: float) -> Matrix:
    """Return the reward of each token [answers, T]: -beta times its log-ratio to the reference,
    and at the last predicted token also the score of the answer [answers] (arXiv 2203.02155)."""
    rewards = -beta * log_ratios
    predicted = ~np.isnan(log_ratios)
    last = predicted.shape[1] - 1 - predicted[:, ::-1].argmax(1)
    rewards[np.arange(len(rewards)), last] += scores
    return rewards


def gae(rewards: Matrix, values: Matrix, *, gamma: float, lambda_: float) -> Matrix:
    """Return generalised advantages (arXiv 1506.02438 eq. 16) [answers, T]:

    A_t = r_t + gamma V_next - V_t + gamma lambda A_next, where next is the next predicted token of
    the answer. Behind the last one V and A are 0, also if the answer was cut: what it might have
    gone on to is worth nothing, since no reward would follow.
    """
    advantages = np.full_like(values, np.nan)
    next_value = next_advantage = np.zeros(len(values))
    for place in reversed(range(values.shape[1])):
        value = values[:, place]
        predicted = ~np.isnan(value)
        advantage = rewards[:, place] + gamma * next_value - value
        advantage = advantage + gamma * lambda_ * next_advantage
        advantages[:, place] = advantage
        next_advantage = np.where(predicted, advantage, next_advantage)
        next_value = np.where(predicted, value, next_value)
    return advantages


def whitened(values: Matrix, *, shift: bool = True) -> Matrix:
    """Return the numbers divided by their standard deviation over all predicted tokens; with
    `shift` after their mean was subtracted."""
    mean, variance = np.nanmean(values), np.nanvar(values)
    return (values - mean * shift) / np.sqrt(variance + EPSILON)


def adapted(beta: float, kl: float, *, target: float, horizon: int, answers: int) -> float:
    """Return the coefficient of KL after a rollout with the divergence `kl` per answer (arXiv
    1909.08593 section 2.2)."""
    error = np.clip(kl / target - 1, -LARGEST_ERROR, LARGEST_ERROR)
    return float(beta * (1 + error * answers / horizon))
