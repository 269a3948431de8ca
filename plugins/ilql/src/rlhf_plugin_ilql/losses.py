"""The losses of implicit language Q-learning (arXiv 2206.11871, section 4), as trlX computes
them."""

from torch import Tensor


def last_predictions(answer: Tensor) -> Tensor:
    """Return whether each prediction [N] is the last one of its answer, from the number of its
    answer [N]; those of an answer follow each other."""
    following = answer.new_full((len(answer),), -1)
    following[:-1] = answer[1:]
    return following != answer


def next_values(v: Tensor, last: Tensor) -> Tensor:
    """Return V of the state in which the answer's next token is predicted [N]; 0 at its end."""
    return v.roll(-1).masked_fill(last, 0.0)


def expectile(q: Tensor, v: Tensor, tau: float) -> Tensor:
    """Return |tau - 1[Q < V]| (Q - V)^2 [N], whose minimum over V is the expectile tau of Q."""
    below = (q < v).float()
    return (below * (1 - tau) + (1 - below) * tau) * (q - v).square()
