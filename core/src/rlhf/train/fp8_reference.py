"""A reference with products in FP8 under a policy without (`model.fp8 reference`)."""

from collections.abc import Mapping

import torch

from rlhf.errors import SameOnAllRanks
from rlhf.model.role import Role
from rlhf.readouts import answer_logprobs
from rlhf.reference.live import evaluating
from rlhf.train.context import RunContext
from rlhf.trainer import Trainer


def fp8_line(run: RunContext, trainer: Trainer) -> str:
    """Return how far log-probabilities of a reference in FP8 are from the policy's, in the first
    micro-batch of each rank. Collective."""
    role = reference_in_fp8(run.roles)
    order = run.order(trainer)
    batch = order[order.step(0).micro[0]].to(run.device)
    read = []
    for engine in (run.roles["policy"].engine, role.engine):
        with torch.no_grad(), evaluating(engine):
            read.append(engine(batch, answer_logprobs))
    sums = []
    for name in ("tokens/logprobs", "logprobs"):
        policy, reference = (each[name].double() for each in read)
        sums.append((float((reference - policy).abs().sum()), len(policy)))
    of_tokens, of_answers = (
        sum(total for total, _ in ranks) / max(sum(number for _, number in ranks), 1)
        for ranks in zip(*run.mesh.gather(sums), strict=True)
    )
    layers = role.engine.module.layers.removeprefix("layers     ")
    return (
        f"reference  {layers}; its log-probabilities differ from the policy's by {of_tokens:.2g} "
        f"per token and {of_answers:.2g} per answer (mean of the first rows)"
    )


def reference_in_fp8(roles: Mapping[str, Role]) -> Role:
    """Return the reference whose products `model.fp8 reference` computes in FP8. Raises RLHFError
    on every rank if there is none."""
    role = roles.get("reference")
    if role is None or role.spec.config.model.fp8_recipe is None or role.spec.task != "causal":
        raise SameOnAllRanks(
            "model.fp8 reference has no effect: this run has no reference that is a second "
            "language model; remove model.fp8"
        )
    return role
