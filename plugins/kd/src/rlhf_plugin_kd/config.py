"""The section `kd`."""

from typing import Any, Literal

from attrs import field, fields, frozen, validators

from rlhf.plugin import RLHFError, check_model_folder, check_rules, without_revisions

inside: Any = validators.and_(validators.gt(0), validators.lt(1))
share: Any = validators.and_(validators.ge(0), validators.le(1))


@frozen(kw_only=True)
class KDConfig:
    """Knowledge distillation."""

    teacher: str = ""
    """Folder or hub name of the teacher, a causal language model with the student's
    tokenizer."""
    teacher_revision: str | None = None
    """Branch, tag or commit of a teacher on the hub."""
    loss: Literal["forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl"] = (
        "forward_kl"
    )
    """Divergence of the student q from the teacher p: KL(p || q), KL(q || p), the generalised
    Jensen-Shannon divergence (arXiv 2306.13649), or the skewed ones (arXiv 2402.03898)."""
    temperature: float = field(default=1.0, validator=validators.gt(0))
    """Divides both models' logits; the divergence is multiplied by its square."""
    beta: float = field(default=0.5, validator=inside)
    """jsd: share of the teacher in the mixture; near 0 like forward KL, near 1 like reverse KL."""
    skew: float = field(default=0.1, validator=inside)
    """Skewed KLs: share of the divergence's first distribution in the mixture (0.1 in the
    paper)."""
    sft: float = field(default=0.0, validator=share)
    """Weight of the tokens' negative log-likelihood; that of the divergence is 1 - sft."""
    cache_top: int | None = field(default=None, validator=validators.optional(validators.gt(0)))
    """Number of the teacher's most likely tokens that are cached on disk for each prediction; all
    others count as one further outcome. null runs the teacher alongside the student, over the whole
    vocabulary."""
    on_policy: float = field(default=0.0, validator=share)
    """Share of the rows whose answer the student writes again in every step (GKD's lambda)."""
    teacher_answers: float = field(default=0.0, validator=share)
    """Share of the rows whose answer the teacher writes again in every step; 1 with sft 1 is
    sequence-level distillation (arXiv 1606.07947)."""
    max_new_tokens: int = field(default=256, validator=validators.gt(0))
    """Maximum length of the new answers of on_policy and teacher_answers."""
    sampling_temperature: float = field(default=1.0, validator=validators.gt(0))
    """Temperature at which the new answers are sampled."""

    @property
    def writes(self) -> bool:
        """Whether any answers are written during the run."""
        return self.on_policy + self.teacher_answers > 0

    def __attrs_post_init__(self) -> None:
        new = {"on_policy": self.on_policy, "teacher_answers": self.teacher_answers}
        shares = " and ".join(f"{name} {share:g}" for name, share in new.items() if share)
        changed = " and ".join(self._changed_without_effect())
        check_rules(
            (
                f"{shares} are shares of the same rows; together they must be at most 1",
                self.on_policy + self.teacher_answers > 1,
            ),
            (
                f"sft {self.sft:g} cannot be combined with on_policy {self.on_policy:g}: the "
                "student's own answers would count as correct",
                self.sft and self.on_policy,
            ),
            (
                f"cache_top cannot be combined with {shares}: it covers only the rows' own answers",
                self.cache_top is not None and self.writes,
            ),
            (
                "sft 1 learns nothing from the teacher; lower it, or add teacher_answers",
                self.sft == 1 and not self.teacher_answers,
            ),
            (f"{changed} would have no effect here: {NEEDS}", changed),
        )

    def _changed_without_effect(self) -> list[str]:
        """Return the settings that differ from their defaults although nothing reads them."""
        default = {item.name: item.default for item in fields(KDConfig)}
        unread = {
            "beta": self.loss != "jsd",
            "skew": not self.loss.startswith("skewed"),
            "max_new_tokens": not self.writes,
            "sampling_temperature": not self.writes,
        }
        return [name for name in unread if unread[name] and getattr(self, name) != default[name]]


NEEDS = (
    "beta needs the loss jsd, skew a skewed one, max_new_tokens and sampling_temperature need "
    "on_policy or teacher_answers"
)
"""What the settings need that do not always have an effect."""


def check(config: Any) -> None:
    """Raise RLHFError if the teacher is missing, is not a model, or has a revision that cannot have
    an effect."""
    teacher = config.kd.teacher
    if not teacher:
        raise RLHFError("kd.teacher is missing; pass --kd.teacher FOLDER_OR_HUB_NAME")
    check_model_folder(teacher, "kd.teacher")
    unversioned = without_revisions(teacher)
    if config.kd.teacher_revision and unversioned:
        raise RLHFError(f"kd.teacher_revision has no effect on {unversioned}; remove it")
