"""The section `dpo`, and which of its settings each loss reads."""

from typing import Any, Literal

from attrs import field, frozen, validators

from rlhf.errors import nearest
from rlhf.plugin import Config, check_reference, check_rules

share: Any = validators.and_(validators.ge(0), validators.lt(0.5))


@frozen(kw_only=True)
class Kind:
    """What a loss compares and which settings it reads."""

    reads: tuple[str, ...] = ("beta",)
    reference: bool = True
    """Whether the loss compares log-ratios to the reference, or the policy's log-probabilities."""
    per_token: bool = False
    """Whether it compares means over the tokens of an answer instead of sums."""
    centred: bool = False
    """Whether their mean over the optimizer step is subtracted."""
    sft: bool = False
    """Whether its paper adds the negative log-likelihood of the chosen answer: the term `sft`."""


KINDS = {
    "sigmoid": Kind(reads=("beta", "label_smoothing")),
    "sigmoid_norm": Kind(reads=("beta", "label_smoothing"), per_token=True),
    "robust": Kind(reads=("beta", "label_smoothing")),
    "hinge": Kind(),
    "ipo": Kind(per_token=True),
    "ipo_sum": Kind(),
    "exo_pair": Kind(reads=("beta", "label_smoothing")),
    "nca_pair": Kind(),
    "bco_pair": Kind(centred=True),
    "sppo_hard": Kind(),
    "apo_zero": Kind(),
    "apo_down": Kind(),
    "discopop": Kind(reads=("beta", "discopop_tau")),
    "simpo": Kind(reads=("beta", "gamma"), reference=False, per_token=True),
    "cpo": Kind(reads=("beta", "label_smoothing"), reference=False, sft=True),
    "orpo": Kind(reference=False, per_token=True, sft=True),
}
"""The pair losses. `sft` is not among them: it is a term per token."""


def kind_of(name: str) -> Kind:
    """Return what a loss compares. A user's own `module:function` is like `sigmoid`."""
    return KINDS.get(name) or Kind(reads=("beta", "label_smoothing", "gamma", "discopop_tau"))


@frozen(kw_only=True)
class LossEntry:
    """One addend of the loss."""

    name: str
    """A pair loss, `sft`, or `module:function` of your own."""
    weight: float = field(default=1.0, validator=validators.ge(0))
    """Factor on the loss; 0 removes the sft term that cpo and orpo add."""


def _known(instance: Any, attribute: Any, entries: tuple[LossEntry, ...]) -> None:
    names = [entry.name for entry in entries]
    for entry in entries:
        if entry.name not in KINDS and entry.name != "sft" and ":" not in entry.name:
            near = nearest(entry.name, (*KINDS, "sft"))
            hint = f" (did you mean {near}?)" if near else ""
            known = ", ".join((*KINDS, "sft"))
            raise ValueError(
                f"unknown loss {entry.name!r}{hint}; available: {known} and module:function"
            )
        if names.count(entry.name) > 1:
            raise ValueError(f"duplicate loss {entry.name!r}; give it one weight")
        added = entry.name == "sft" and any(kind_of(name).sft for name in names)
        if entry.weight == 0 and not added:
            raise ValueError(f"{entry.name} has the weight 0; remove it")
    if not any(name != "sft" for name in names):
        raise ValueError("sft is not a pair loss; add a pair loss, or use `rlhf run sft`")


@frozen(kw_only=True)
class DPOConfig:
    """Direct preference optimisation and its relatives."""

    loss: tuple[LossEntry, ...] = field(default=(LossEntry(name="sigmoid"),), validator=_known)
    """One name or a list of names, each with its weight: `[sigmoid, {name: sft, weight: 0.2}]`."""
    beta: float = field(default=0.1, validator=validators.gt(0))
    """Penalty on the distance from the reference (arXiv 2305.18290). In simpo, the scale of the
    reward (2 in arXiv 2405.14734); in orpo, the weight of the odds ratio (0.1 in arXiv
    2403.07691)."""
    label_smoothing: float | None = field(default=None, validator=validators.optional(share))
    """Assumed share of pairs in the wrong order; default 0, in exo_pair 1e-3."""
    gamma: float = field(default=0.5, validator=validators.ge(0))
    """simpo: target margin between the rewards (arXiv 2405.14734)."""
    discopop_tau: float = field(default=0.05, validator=validators.gt(0))
    """discopop: temperature of the blend (arXiv 2406.08414)."""
    reference: Literal["auto", "adapter", "engine", "cache", "none"] = "auto"
    """What the policy is compared with. adapter: itself with its adapter off. engine: a frozen
    second model. cache: log-probabilities that are computed once and kept on disk. none: nothing.
    auto: chosen for the run, which prints the reason."""
    reference_every: int | None = field(
        default=None, validator=validators.optional(validators.gt(0))
    )
    """Steps between updates of the reference towards the policy (tau of TR-DPO, arXiv 2404.09656,
    which uses 512 with a mix of 1); null: it never changes."""
    reference_mix: float = field(
        default=0.6, validator=validators.and_(validators.gt(0), validators.le(1))
    )
    """Share of the policy in the updated reference (alpha of TR-DPO, 0.6); 1 replaces it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the pair losses."""
        return tuple(entry.name for entry in self.loss if entry.name != "sft")

    @property
    def sft_weight(self) -> float:
        """Factor on the sft term: as configured, else 1 if a pair loss adds the term."""
        weights = [entry.weight for entry in self.loss if entry.name == "sft"]
        return weights[0] if weights else float(any(kind_of(name).sft for name in self.names))

    @property
    def needs_reference(self) -> bool:
        """Whether any loss compares with a reference."""
        return self.reference != "none" and any(kind_of(name).reference for name in self.names)

    def __attrs_post_init__(self) -> None:
        names, smoothing = ", ".join(self.names), self.label_smoothing
        read = {setting for name in self.names for setting in kind_of(name).reads}
        has_reference = any(kind_of(name).reference for name in self.names)
        moves, fixed = self.reference_every is not None, ("adapter", "cache", "none")
        tau = self.discopop_tau
        check_rules(
            (
                f"label_smoothing has no effect in {names}",
                smoothing and "label_smoothing" not in read,
            ),
            (f"gamma has no effect in {names}", self.gamma != 0.5 and "gamma" not in read),
            (f"discopop_tau has no effect in {names}", tau != 0.05 and "discopop_tau" not in read),
            (
                "exo_pair needs label_smoothing above 0; its default is 1e-3",
                "exo_pair" in self.names and smoothing == 0,
            ),
            (
                f"reference {self.reference} has no effect: {names} does not use a reference",
                not has_reference and self.reference not in ("auto", "none"),
            ),
            (
                "reference_mix has no effect without reference_every",
                self.reference_mix != 0.6 and not moves,
            ),
            (
                f"reference_every has no effect: {names} does not use a reference",
                moves and not has_reference,
            ),
            (
                f"reference_every needs reference engine, because {self.reference} cannot change",
                moves and self.reference in fixed,
            ),
        )


def check(config: Config) -> None:
    """Raise RLHFError for a reference that this run cannot have."""
    section: DPOConfig = config.own
    if section.needs_reference:
        check_reference(config, section.reference, every=section.reference_every)
