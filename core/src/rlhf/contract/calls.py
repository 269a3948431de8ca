"""Calls a trainer's `survey` and `loss`, and checks what they do.

What they return is checked whenever they return, on the host only. How they call the models is
watched in the first survey and the first loss: most mistakes have no effect, or a silent one,
unless weights are sharded.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rlhf.contract.checks import (
    Moment,
    call_of,
    check_counts,
    check_graph,
    check_loss,
    check_roles,
    check_survey,
    naming,
)
from rlhf.contract.sums import ROUTER_LOSS, Totals
from rlhf.data.batch import PackedBatch
from rlhf.errors import RLHFError
from rlhf.model.packed import PackedModel
from rlhf.model.parts import decoder
from rlhf.model.role import POLICY, Role
from rlhf.trainer import Loss, Term, Trainer


@define
class Contract:
    """Calls a trainer's `survey` and `loss`, and checks what they return."""

    trainer: Trainer
    trained: Mapping[str, Role]
    """The trained models by role."""
    _watched: set[str] = field(factory=set, init=False)
    """Methods whose calls of the models have been watched."""

    def survey(self, batch: PackedBatch, moment: Moment | None = None) -> dict[str, Tensor]:
        """Return the trainer's values of a micro-batch. `moment` is for the text of an error.
        Collective."""
        call = call_of(self.trainer, "survey")
        with naming(call, moment, batch.rows), self._watching("survey", call):
            values = self.trainer.survey(batch)
        check_survey(values, batch, call)
        return dict(values)

    def loss(self, batch: PackedBatch, totals: Totals, moment: Moment | None = None) -> Loss:
        """Return the trainer's loss of a micro-batch, in a step with these totals. `moment` is for
        the text of an error. Collective."""
        call = call_of(self.trainer, "loss")
        training = torch.is_grad_enabled()
        name = "loss" if training else "loss of an evaluation"
        with naming(call, moment, batch.rows), self._watching(name, call) as outputs:
            loss = self.trainer.loss(batch)
        check_loss(loss, call, training=training)
        loss = detached(loss)
        check_counts(loss, totals, call)
        if training:
            check_roles(loss, self.trained.keys(), call)
        if training and outputs is not None:
            check_graph(loss, self.trained, outputs, call)
        return with_router_losses(loss, self.trained)

    @contextmanager
    def _watching(self, name: str, call: str) -> Iterator[set[Any] | None]:
        """Watch the models in the first call of a method: yields the nodes of the graph that their
        forwards return. Later calls get None."""
        if name in self._watched:
            yield None
            return
        self._watched.add(name)
        nodes: set[Any] = set()
        with ExitStack() as stack:
            for role, model in self.trained.items():
                if isinstance(model.engine.module, PackedModel):
                    watch(model.engine.module, role, call, nodes, stack)
            yield nodes


def detached(loss: Loss) -> Loss:
    """Return the loss with detached metrics, whose graphs would otherwise live until the next. A
    plain number becomes the largest of those of all ranks and micro-batches."""
    metrics = {}
    for name, metric in loss.metrics.items():
        if isinstance(metric, tuple):
            metrics[name] = (metric[0].detach(), metric[1])
        else:
            device = loss.terms[0].sum.device
            metrics[name] = (torch.full((), metric, dtype=torch.float64, device=device), "max")
    return Loss(loss.terms, metrics)


def with_router_losses(loss: Loss, trained: Mapping[str, Role]) -> Loss:
    """Return the loss with a term for each mixture of experts, the mean over its forwards, and the
    metric `router_loss` of the policy."""
    for role, model in trained.items():
        module = model.engine.module
        losses = module.router_losses if isinstance(module, PackedModel) else []
        if losses:
            mean = torch.stack(losses).mean()
            losses.clear()
            name = ROUTER_LOSS if role == POLICY else f"{ROUTER_LOSS}_{role}"
            term = Term(mean, per="examples", weight=module.router_loss, role=role)
            metrics = {**loss.metrics, name: (mean.detach(), "examples")}
            loss = Loss((*loss.terms, term), metrics)
    return loss


def watch(module: PackedModel, role: str, call: str, nodes: set[Any], stack: ExitStack) -> None:
    """Add to `nodes` what each forward of `module` returns, and raise RLHFError if the model in it
    is called directly."""
    inside = 0

    def enter(*_: Any) -> None:
        nonlocal inside
        inside += 1

    def leave(_: nn.Module, inputs: Any, outputs: Any) -> None:
        nonlocal inside
        inside -= 1
        leaves = (item for item in tree_leaves(outputs) if isinstance(item, Tensor))
        nodes.update(item.grad_fn for item in leaves if item.grad_fn is not None)

    def refuse(*_: Any) -> None:
        if not inside:
            raise RLHFError(
                f"{call} calls the model of the {role} directly, without its engine: examples "
                "would attend to each other, and at ZeRO stage 3 the weights are sharded; call the "
                "engine with a readout"
            )

    for hook in (
        module.register_forward_pre_hook(enter, prepend=True),
        module.register_forward_hook(leave, always_call=True),
        decoder(module.causal).register_forward_pre_hook(refuse, prepend=True),
    ):
        stack.callback(hook.remove)
