"""The pair losses: `(chosen [E], rejected [E], config) -> loss per pair [E]`, float32.

`chosen` and `rejected` are as `config.KINDS` says for each loss: log-probabilities of the two
answers under the policy, minus the reference's, summed or averaged over the tokens of the answer.
With the difference d = chosen - rejected, s the logistic function, b = `beta` and
e = `label_smoothing`:
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf.trainer import PackedBatch
from rlhf_plugin_dpo.config import DPOConfig, Kind

PairLoss = Callable[[Tensor, Tensor, DPOConfig], Tensor]


def sigmoid(chosen: Tensor, rejected: Tensor, config: DPOConfig) -> Tensor:
    """-(1 - e) log s(b d) - e log s(-b d). DPO (arXiv 2305.18290 eq. 7); e > 0 is conservative DPO
    (Mitchell, "A note on DPO with noisy preferences", 2023, eq. 3)."""
    logits = config.beta * (chosen - rejected)
    smoothing = config.label_smoothing or 0.0
    return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


def robust(chosen: Tensor, rejected: Tensor, config: DPOConfig) -> Tensor:
    """(-(1 - e) log s(b d) + e log s(-b d)) / (1 - 2 e): unbiased where a share e of the labels is
    flipped (arXiv 2403.00409)."""
    logits = config.beta * (chosen - rejected)
    smoothing = config.label_smoothing or 0.0
    loss = -(1 - smoothing) * logsigmoid(logits) + smoothing * logsigmoid(-logits)
    return loss / (1 - 2 * smoothing)


def hinge(chosen: Tensor, rejected: Tensor, config: DPOConfig) -> Tensor:
    """max(0, 1 - b d). SLiC-HF's calibration loss (arXiv 2305.10425), scaled by b and with the
    margin 1 / b, on log-ratios as RSO has it (arXiv 2309.06657)."""
    return torch.relu(1 - config.beta * (chosen - rejected))


def ipo(chosen: Tensor, rejected: Tensor, config: DPOConfig) -> Tensor:
    """(d - 1 / (2 b))^2. IPO (arXiv 2310.12036 eq. 17) with b for its tau. As `ipo` it is given
    averages over tokens, the authors' correction after publication; as `ipo_sum` the sums of the
    paper."""
    return (chosen - rejected - 1 / (2 * config.beta)).square()


def exo_pair(chosen: Tensor, rejected: Tensor, config: DPOConfig) -> Tensor:
    """s(b d) (log s(b d) - log(1 - e)) + s(-b d) (log s(-b d) - log e): the reverse KL from the
    smoothed label (1 - e, e). EXO (arXiv 2402.00856 eq. 16)."""
    logits = config.beta * (chosen - rejected)
    smoothing = 1e-3 if config.label_smoothing is None else config.label_smoothing
    right, wrong = math.log1p(-smoothing), math.log(smoothing)
    first, second = logsigmoid(logits), logsigmoid(-logits)
    return first.exp() * (first - right) + second.exp() * (second - wrong)


def nca_pair(chosen: Tensor, rejected: Tensor, config: DPOConfig) -> Tensor:
    """-log s(b c) - (log s(-b c) + log s(-b r)) / 2, c and r the two answers. Pairwise NCA (arXiv
    2402.05369)."""
    good, bad = config.beta * chosen, config.beta * rejected
    return -logsigmoid(good) - (logsigmoid(-good) + logsigmoid(-bad)) / 2


def bco_pair(chosen: Tensor, rejected: Tensor, config: DPOConfig) -> Tensor:
    """-log s(b c) - log s(-b r), with c and r minus the mean of both over the step; b times that
    mean is the reward shift. BCO (arXiv 2404.04656) takes a running mean over batches, which
    depends on earlier steps and on how a step is split. TRL's `bco_pair` has no shift."""
    return -logsigmoid(config.beta * chosen) - logsigmoid(-config.beta * rejected)


def sppo_hard(chosen: Tensor, rejected: Tensor, config: DPOConfig) -> Tensor:
    """(c - 1 / (2 b))^2 + (r + 1 / (2 b))^2: the chosen answer always wins, the rejected never.
    SPPO (arXiv 2405.00675 eq. 4.7) with b for its 1 / eta."""
    goal = 1 / (2 * config.beta)
    return (chosen - goal).square() + (rejected + goal).square()


def apo_zero(chosen: Tensor, rejected: Tensor, config: DPOConfig) -> Tensor:
    """1 - s(b c) + s(b r): the chosen up, the rejected down. APO-zero (arXiv 2408.06266 eq. 7)."""
    return 1 - torch.sigmoid(config.beta * chosen) + torch.sigmoid(config.beta * rejected)


def apo_down(chosen: Tensor, rejected: Tensor, config: DPOConfig) -> Tensor:
    """s(b c) + 1 - s(b d): both down, the rejected further. APO-down (arXiv 2408.06266 eq. 8)."""
    margin = torch.sigmoid(config.beta * (chosen - rejected))
    return torch.sigmoid(config.beta * chosen) + 1 - margin


def discopop(chosen: Tensor, rejected: Tensor, config: DPOConfig) -> Tensor:
    """(1 - m) (-log s(b d)) + m exp(-b d) with m = s(b d / tau). DiscoPOP's log-ratio modulated
    loss (arXiv 2406.08414 eq. 5)."""
    logits = config.beta * (chosen - rejected)
    blend = torch.sigmoid(logits / config.discopop_tau)
    # One exponent: by itself exp(-logits) overflows where the blend is 0.
    exponential = torch.exp(logsigmoid(logits / config.discopop_tau) - logits)
    return (1 - blend) * -logsigmoid(logits) + exponential


def simpo(chosen: Tensor, rejected: Tensor, config: DPOConfig) -> Tensor:
    """-log s(b d - gamma) over log-probabilities per token. SimPO (arXiv 2405.14734)."""
    return -logsigmoid(config.beta * (chosen - rejected) - config.gamma)


def orpo(chosen: Tensor, rejected: Tensor, config: DPOConfig) -> Tensor:
    """-b log s(log odds(c) - log odds(r)), log odds(x) = x - log(1 - exp x) over log-probabilities
    per token: b is the paper's lambda. ORPO (arXiv 2403.07691, the odds in eq. 4, the loss in eq.
    7); its other addend, the negative log-likelihood of the chosen answer, is the term `sft`."""
    return -config.beta * logsigmoid(log_odds(chosen) - log_odds(rejected))


def log_odds(logprob: Tensor) -> Tensor:
    """Return log(p / (1 - p)) from log p, exact also for p near 1; p = 1 is taken as just below."""
    below = logprob.clamp(max=-torch.finfo(logprob.dtype).tiny)
    return below - torch.log(-torch.expm1(below))


LOSSES: dict[str, PairLoss] = {
    "sigmoid": sigmoid,
    "sigmoid_norm": sigmoid,
    "robust": robust,
    "hinge": hinge,
    "ipo": ipo,
    "ipo_sum": ipo,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "simpo": simpo,
    "cpo": sigmoid,
    "orpo": orpo,
}
"""`sigmoid_norm` is DPO over log-ratios per token (Tulu 3, arXiv 2411.15124). `cpo` is DPO without
a reference (arXiv 2401.08417 eq. 3); the other addend of its paper is the term `sft`."""


def compared(
    kind: Kind, logprobs: Tensor, reference: Tensor, batch: PackedBatch
) -> tuple[Tensor, Tensor]:
    """Return what a loss of this kind compares, chosen [E] and rejected [E], from log-probabilities
    of the answers [A]."""
    values = logprobs - reference if kind.reference else logprobs
    if kind.per_token:
        ones = torch.ones_like(batch.answer, dtype=values.dtype)
        values = values / torch.zeros_like(values).index_add(0, batch.answer, ones).clamp(min=1)
    if kind.centred:
        values = values - batch.step["log_ratio"].mean()
    return values[0::2], values[1::2]
