"""Checks of what the methods of a trainer return, in messages for its author."""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import frozen
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rlhf.contract.sums import EXTREMES, ROUTER_LOSS, TERM, Totals
from rlhf.data.batch import PackedBatch
from rlhf.data.columns import errors_at
from rlhf.data.example import Example
from rlhf.data.examples import Examples
from rlhf.data.mapping import check_example
from rlhf.engine import Mesh
from rlhf.errors import Place, RLHFError, SameOnAllRanks, counted
from rlhf.hookspecs import CORE_METRICS
from rlhf.model.packed import PackedModel
from rlhf.model.role import POLICY, Role
from rlhf.trainer import Loss, Term, Trainer

POSITIONS = ("examples", "answers")
"""Names in `batch.step` that core writes: the positions of a batch's values in the step's."""


def call_of(trainer: Trainer, method: str) -> str:
    """Return what a method of a trainer is called in an error."""
    return f"{type(trainer).__name__}.{method}()"


@frozen
class Moment:
    """When a method of the trainer is called with some of these examples."""

    when: str
    examples: Examples

    def of(self, rows: Iterable[int]) -> str:
        """Return in words when the method is called with `rows`."""
        return f"in {self.when} with {self.examples.names(rows) or 'no rows'}"


def after(step: int, examples: Examples) -> Moment:
    """Return the moment of an evaluation of held-out examples after so many steps."""
    return Moment(f"the evaluation after step {step}", examples)


@contextmanager
def naming(call: str, moment: Moment | None, rows: Iterable[int]) -> Iterator[None]:
    """Note on an error of the trainer's own code which method failed, when and with which rows."""
    try:
        yield
    except RLHFError:
        raise
    except Exception as error:
        if moment is not None:
            error.add_note(Place(f"{call} failed {moment.of(rows)}"))
        raise


def check_setup(trainer: Trainer, roles: Mapping[str, Role]) -> None:
    """Raise RLHFError if `setup` has loaded no policy, or left parameters on the trainer that no
    optimizer knows."""
    call = call_of(trainer, "setup")
    if POLICY not in roles:
        raise RLHFError(f"{call} loads no policy; call run.load('policy')")
    known = {id(item) for role in roles.values() for item in role.engine.module.parameters()}
    for name, value in vars(trainer).items():
        for leaf in tree_leaves(value):
            is_module = isinstance(leaf, nn.Module)
            own = [leaf] if isinstance(leaf, nn.Parameter) else []
            own = leaf.parameters() if is_module else own
            if any(item.requires_grad and id(item) not in known for item in own):
                kind, remedy = ("n nn.Parameter", "pass it to run.load() as `extra`")
                if is_module:
                    kind, remedy = (f" {type(leaf).__name__}", "pass it to run.prepare()")
                raise RLHFError(
                    f"{type(trainer).__name__}.{name} is a{kind} that no optimizer trains; {remedy}"
                )


def check_counts(loss: Loss, totals: Totals, call: str) -> None:
    """Raise RLHFError for a term or a metric that is per something that is not counted, and for a
    count below 0."""
    unknown = [
        (f"a term {number}", term.per)
        for number, term in enumerate(loss.terms) if term.per not in totals
    ] + [
        (f"the metric {name!r}", metric[1]) for name, metric in loss.metrics.items()
        if isinstance(metric, tuple) and metric[1] not in {"", *EXTREMES, *totals}
    ]  # fmt: skip
    if unknown:
        what, per = unknown[0]
        raise RLHFError(
            f"{call} returned {what} per {per!r}, which is not a known count; use one of "
            f"{', '.join(sorted(totals))}, or a name that survey() returns"
        )
    for number, term in enumerate(loss.terms):
        total = totals[term.per]
        if isinstance(total, float) and not total >= 0:
            raise RLHFError(
                f"{call} returned a term {number} per {term.per!r}, which sums up to {total:g} "
                "over the step; a count cannot be negative"
            )


def check_loss(loss: Any, call: str, *, training: bool) -> None:
    """Raise RLHFError unless `loss` is a Loss of scalar sums, which have a gradient in training."""
    if not isinstance(loss, Loss):
        raise RLHFError(
            f"{call} returned {type(loss).__name__} instead of a Loss; return "
            'Loss((Term(sum, per="tokens"),))'
        )
    terms = loss.terms
    if not isinstance(terms, Sequence) or not all(isinstance(term, Term) for term in terms):
        raise RLHFError(f"{call} returned a Loss whose terms are not a tuple of Term")
    if not terms:
        raise RLHFError(f"{call} returned a Loss without terms")
    for number, term in enumerate(terms):
        check_sum(term.sum, f"{call} returned a term {number} whose sum")
        if training and not term.sum.requires_grad:
            raise RLHFError(
                f"{call} returned a term {number} whose sum has no gradient; compute it from what "
                "an engine returned, and do not detach it"
            )
    check_metrics(loss.metrics, call)


def check_metrics(metrics: Mapping[str, Any], call: str) -> None:
    """Raise RLHFError unless each metric is a sum with what it is per, by a name that core does not
    use."""
    for name, metric in metrics.items():
        if name in CORE_METRICS or name.startswith((TERM, f"{ROUTER_LOSS}_")):
            raise RLHFError(
                f"{call} returned a metric {name!r}, a name that core uses itself; rename it"
            )
        if isinstance(metric, int | float):
            continue
        if not isinstance(metric, tuple) or len(metric) != 2:
            raise RLHFError(
                f"{call} returned the metric {name!r} as {type(metric).__name__}; return a pair "
                '(sum, "tokens"), or a number'
            )
        check_sum(metric[0], f"{call} returned a metric {name!r} whose sum", scalar=metric[1] != "")


def check_sum(value: Any, what: str, *, scalar: bool = True) -> None:
    """Raise RLHFError unless `value` is a tensor, and a scalar one unless it need not be."""
    if not isinstance(value, Tensor):
        raise RLHFError(f"{what} is {type(value).__name__}; return a tensor")
    if scalar and value.dim():
        raise RLHFError(f"{what} has shape {list(value.shape)}; sum it to a scalar")


def check_roles(loss: Loss, trained: Collection[str], call: str) -> None:
    """Raise RLHFError unless each trained model has a term."""
    roles = {term.role for term in loss.terms}
    if roles != set(trained):
        raise RLHFError(
            f"{call} returned terms for {' and '.join(sorted(roles))}, but the run trains "
            f"{' and '.join(sorted(trained))}; return a term for each of them"
        )


def check_graph(
    loss: Loss, trained: Mapping[str, Role], outputs: Collection[Any], call: str
) -> None:
    """Raise RLHFError if a term reaches the weights of another model, whose engine would not reduce
    their gradients, or weights that were read outside of a forward, where ZeRO-3 shards them."""
    owners = {
        id(item): (role, name) for role, model in trained.items()
        for name, item in model.engine.module.named_parameters()
    }  # fmt: skip
    packed = {r for r, model in trained.items() if isinstance(model.engine.module, PackedModel)}
    for term in loss.terms:
        for item in leaves(term.sum, stop=outputs):
            role, name = owners.get(id(item), ("", ""))
            if role in packed:
                raise RLHFError(
                    f"{call} reads the weight {name} of the {role} outside of the engine's "
                    "forward, where it is sharded at ZeRO stage 3; read it in a readout"
                )
        for item in leaves(term.sum):
            role, _ = owners.get(id(item), (term.role, ""))
            if role != term.role:
                raise RLHFError(
                    f"{call} returned a term of {term.role!r} that depends on the weights of "
                    f"{role!r}; detach what it uses of them, or prepare both as one module"
                )


def leaves(value: Tensor, *, stop: Collection[Any] = ()) -> Iterator[Tensor]:
    """Yield the tensors that get a gradient of `value` by a path without the nodes of `stop`."""
    waiting, seen = [value.grad_fn], set(stop)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [function for function, _ in node.next_functions]


def check_survey(values: Any, batch: PackedBatch, call: str) -> None:
    """Raise RLHFError unless `values` are tensors with one entry per example or per answer."""
    if not isinstance(values, Mapping):
        raise RLHFError(
            f"{call} returned {type(values).__name__} instead of a dictionary of tensors"
        )
    sizes = (batch.num_examples, batch.num_answers)
    for name, value in values.items():
        if name in POSITIONS:
            raise RLHFError(f"{call} returned {name!r}, a name that core uses itself; rename it")
        if not isinstance(value, Tensor):
            raise RLHFError(f"{call} returned {name!r} as {type(value).__name__}; return a tensor")
        if not value.dim() or len(value) not in sizes:
            raise RLHFError(
                f"{call} returned {name!r} of shape {list(value.shape)} for {sizes[0]} examples "
                f"with {sizes[1]} answers; its first dimension must be one of these"
            )


def check_names(by_batch: Sequence[Mapping[str, Any]], mesh: Mesh, trainer: Trainer) -> None:
    """Raise RLHFError unless a step's surveys have the same names on all ranks, which add up their
    values in this order. Collective."""
    shares = mesh.gather(sorted({tuple(values) for values in by_batch}))
    found = sorted({names for share in shares for names in share})
    if len(found) > 1:
        raise SameOnAllRanks(
            f"{call_of(trainer, 'survey')} must return the same names for every micro-batch on all "
            f"ranks, also for one without rows, but returned {list(found[0])} and {list(found[1])}"
        )


def check_rollout(
    examples: Any, trainer: Trainer, moment: Moment, rows: Sequence[int], mesh: Mesh
) -> None:
    """Raise RLHFError unless `examples` is one for each of `rows`, and the same on every rank,
    since ranks would otherwise train on different rows. Collective."""
    call, when = call_of(trainer, "rollout"), moment.when
    found = counted(len(examples), "example") if isinstance(examples, Sequence) else None
    if found is None or len(examples) != len(rows):
        raise RLHFError(
            f"{when}: {call} returned {found or type(examples).__name__} for {len(rows)} rows"
        )
    for row, example in zip(rows, examples, strict=True):
        with errors_at(f"{when}, {moment.examples.name(row)}"):
            check_example(example, call)
            if not all(len(answer.tokens) for answer in example.answers):
                raise RLHFError(f"{call} returned an answer without tokens")
    if mesh.world > 1:
        check_same_examples(examples, call, when=when, mesh=mesh)


def check_same_examples(examples: Sequence[Example], call: str, *, when: str, mesh: Mesh) -> None:
    """Raise RLHFError unless all ranks have the same examples. Collective."""
    digests = mesh.gather(digest(examples))
    if len(set(digests)) > 1:
        other = next(rank for rank, each in enumerate(digests) if each != digests[0])
        raise SameOnAllRanks(
            f"{when}: {call} returned other examples on rank {other} than on rank 0; "
            "return the same on every rank, with random numbers that depend on the step only"
        )


def digest(examples: Sequence[Example]) -> str:
    """Return a hash of the tokens and values of examples."""
    plain = [
        (item.prompt, [(each.tokens, each.trained) for each in item.answers], item.values)
        for item in examples
    ]
    text = json.dumps(plain, default=lambda value: value.tolist())
    return hashlib.sha256(text.encode()).hexdigest()
