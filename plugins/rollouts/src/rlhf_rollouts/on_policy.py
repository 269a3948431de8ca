"""The base class of trainers whose policy writes answers that rewards score."""

import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlhf.engine import Engine
from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf.plugin import documented
from rlhf.readouts import token_logprobs
from rlhf.trainer import Example, Examples, PackedBatch, Run, Trainer
from rlhf_rollouts.agreement import check_agreement
from rlhf_rollouts.judged import Judged
from rlhf_rollouts.judges import Judges, kept_columns, started
from rlhf_rollouts.metrics import (
    DRAWING,
    JUDGING,
    Metrics,
    check_names,
    deviations_of,
    measured,
    of_answers,
)
from rlhf_rollouts.passing import rollout_sums
from rlhf_rollouts.reported import Reported
from rlhf_rollouts.room import check_room, check_whole
from rlhf_rollouts.settings import Correction, check_lag
from rlhf_rollouts.tools.offer import Offer, offer
from rlhf_rollouts.tools.prompts import with_tools
from rlhf_rollouts.tools.rewards import spec_of
from rlhf_rollouts.tools.turns import Conversations, Turns
from rlhf_rollouts.trees import blank_rollout, held_out_trees, trained_trees
from rlhf_rollouts.written import draws_of, plain_trees, written

__all__ = ["Judged", "OnPolicyTrainer"]

WITHIN = ("embedded", None)
"""The engine and the replay of runs whose own processes write the answers."""


@documented
class OnPolicyTrainer(Trainer):
    """A trainer on rows of the format `prompt`. A rollout is written, scored, recorded as a file of
    the run and reported here.

    A subclass has a `section`, settings that are an `OnPolicyConfig`, and `loss`, which reads
    `batch.values`: `reward` and what `values` returns have a number for each answer, `old` and
    `drawn` one for each token. A loss that needs other values overrides `trained`, `held_out` and
    `blank_tree` together.
    """

    row_format = "prompt"
    section: ClassVar[str]
    """The name of the trainer's settings, for messages."""
    policy: Engine
    """The model that is trained, which writes the answers."""
    first_step: int = 0
    """Number of steps at the start that do not train the policy."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self.rollout_batches, self.rollout_passes = config.batches, config.passes
        self.offer = self.offered()
        self.row_sources = self.offer and self.offer.schemas
        self.rewards = config.rewards
        if self.offer and self.offer.rewards:
            self.rewards = (*config.rewards, spec_of(str(self.offer.environment)))
        self.names = [spec.label for spec in self.rewards]
        self.readout = partial(token_logprobs, temperature=config.temperature)
        self.reported = Reported()
        self.rollouts = 0
        """How many rollouts have been trained on, with the present one."""

    def values(self, judged: Judged) -> Sequence[Mapping[str, Any]]:
        """Return for each group what the loss needs, such as advantages: a finite number for each
        answer, by name. By default nothing is added to `Judged.values`."""
        return [{} for _ in judged.groups]

    def trained(self, examples: Sequence[Example], judged: Judged, step: int) -> list[Example]:
        """Return what the loss sees of a rollout before step `step` (from 0). Raises RLHFError if
        no answer has a score. Collective."""
        self.check_scored(judged, step)
        old = self.run.read(plain_trees(examples, judged.groups), self.logprobs)
        self.compare(judged, old, step)
        return trained_trees(examples, judged, self.values(judged), old)

    def held_out(self, examples: Sequence[Example], judged: Judged) -> list[Example]:
        """Return what the loss sees of the answers to held-out prompts."""
        return held_out_trees(examples, judged, self.values(judged))

    def blank_tree(self, prompts: NDArray[Any], most: int) -> Example:
        """Return a tree as large as any that `trained` makes, for prompts of these lengths and
        paths of up to `most` tokens."""
        examples, judged = blank_rollout(self.config, prompts, self.names, most=most)
        old = [[[0.0] * len(sample.tokens) for sample in group] for group in judged.groups]
        return trained_trees(examples, judged, self.values(judged), old)[0]

    def check_scored(self, judged: Judged, step: int) -> None:
        """Raise RLHFError if no answer of the rollout before step `step` (from 0) has a score."""
        if np.isnan(judged.total).all():
            raise SameOnAllRanks(
                f"step {step + 1}: no reward has scored any of the {judged.total.size} answers; "
                f"check {self.section}.rewards"
            )

    def offered(self) -> Offer | None:
        """Return what the policy may call. Raises RLHFError for tools that cannot be loaded."""
        if not self.config.tools.are_set:
            return None
        try:
            found = offer(self.config.tools)
        except RLHFError as error:
            raise RLHFError(f"{self.section}.tools: {error}") from error
        if not self.config.rewards and not found.rewards:
            raise RLHFError(
                f"{self.section}.rewards is empty, and {found.environment} has no get_reward; name "
                "a rule or a function, such as exact"
            )
        return found

    def example(self, row: Any) -> Example:
        if self.offer is not None:
            if row.images:
                raise RLHFError(
                    f"{self.section}.tools cannot be used for a row with images; remove one of them"
                )
            row = with_tools(row.columns, self.offer.schemas, self.tokenizer)
        return Example(row.prompt, row.answers, columns=kept_columns(row.columns))

    def setup(self, run: Run) -> None:
        self.run, config = run, self.config
        check_lag(run.config, getattr(config, "correction", Correction()), self.section)
        if self.lags and (run.config.rollouts.engine, run.config.rollouts.replay) == WITHIN:
            run.notes.append(
                "rollouts   lag 1 saves no time with the engine embedded, which writes in the "
                "processes that train; a server writes while they do"
            )
        check_room(run, config.max_new_tokens, f"{self.section}.max_new_tokens")
        limits = {"deadline": config.deadline, "workers": config.workers}
        rewards = run.on_rank_zero(lambda: started(run, self.rewards, **limits), share=False)
        self.policy = run.load("policy", dropout=False, first_step=self.first_step)
        self.check_router(self.policy)
        serves = config.batches * config.passes
        same = config.tools.environment is None
        self.judges = Judges(run, self.rewards, rewards, serves=serves, same_prompts=same)
        self.turns = None
        if self.offer is not None:
            self.turns = Turns(
                run, config.tools, self.offer, workers=config.workers, section=self.section
            )
            weakref.finalize(self, self.turns.close)

    def check_router(self, engine: Engine) -> None:
        """Raise RLHFError if a group could be divided, whose router loss needs all of it."""
        if getattr(engine.module, "router_loss", 0.0):
            check_whole(self.run, self.rollout_shape)

    def rollout_shape(self, examples: Examples, most: int) -> Example:
        return self.reported.marked([self.blank_tree(examples.prompt_lengths, most)])[0]

    def draws(self, examples: Sequence[Example], seeds: Sequence[int]) -> Mapping[str, Any]:
        config = self.config
        return {
            "engine": self.policy, "max_new_tokens": config.max_new_tokens,
            "temperature": config.temperature, **draws_of(examples, seeds, config.answers),
        }  # fmt: skip

    def rollout(
        self, examples: Sequence[Example], step: int, seeds: Sequence[int]
    ) -> Sequence[Example]:
        training, began = self.policy.module.training, time.perf_counter()
        dialogues = self._written(examples, seeds, training=training)
        drawn, examples = time.perf_counter(), dialogues.examples
        scores = self.judges(
            examples, dialogues.groups, step, seeds=seeds, training=training,
            completions=dialogues.completions, environment=dialogues.rewards,
        )  # fmt: skip
        seconds = {JUDGING: time.perf_counter() - drawn}
        if not self.lags:  # With a lag the answers have been waited for before.
            seconds[DRAWING] = drawn - began
        judged = Judged.of(dialogues.groups, scores)
        self.rollouts += training
        made = self.trained(examples, judged, step) if training else self.held_out(examples, judged)
        threshold = None if training else self.config.eval.threshold
        sums = {**rollout_sums(scores, judged, threshold=threshold), **dialogues.sums}
        check_names(sums)
        if training:
            sums |= measured(self.run, seconds)
        return self.reported.add(made, sums, step=step, training=training)

    def _written(
        self, examples: Sequence[Example], seeds: Sequence[int], *, training: bool
    ) -> Conversations:
        """Return the answers to these examples. Collective."""
        config = self.config
        how: dict[str, Any] = {
            "answers": config.answers if training else config.eval.answers,
            "temperature": config.temperature if training else config.eval.temperature,
            "max_new_tokens": config.max_new_tokens, "stop": config.stop,
        }  # fmt: skip
        if self.turns is not None:
            return self.turns(self.policy, examples, seeds, **how)
        groups = written(self.run, self.policy, examples, seeds, **how)
        return Conversations(examples=examples, groups=groups)

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """Return the log-probability of each prediction under the policy [N]."""
        return self.policy(batch, self.readout)["logprobs"]

    def rollout_metrics(self, batch: PackedBatch) -> Metrics:
        """Return the metrics of the answers and their rewards, which every `loss` returns."""
        return of_answers(batch, self.names) | self.reported.metrics(batch)

    @property
    def due(self) -> bool:
        """Whether the answers are compared even if only that takes a forward: in rollouts 1, 2, 4,
        8 and so on, with a lag or in a replay only in the first."""
        power_of_two = not self.rollouts & (self.rollouts - 1)
        return self.rollouts == 1 or (power_of_two and not self.stale)

    @property
    def stale(self) -> bool:
        """Whether the policy may have learned other things than the one that writes its answers."""
        return self.lags or self.run.config.rollouts.replay is not None

    @property
    def lags(self) -> bool:
        """Whether older weights write the answers than those that learn from them."""
        return self.run.config.rollouts.lag > 0

    def compare(self, judged: Judged, trained: Sequence[Sequence[Any]], step: int) -> None:
        """Compare the log-probabilities of the answers in sampling with `trained`, those of the
        trainer for each answer of each group before step `step` (from 0), and note the difference
        in the first rollout. Raises RLHFError above `agreement` of the settings."""
        if self.rollouts > 1 and self.stale:
            return
        drawn = [sample.logprobs for group in judged.groups for sample in group]
        known = [answer for group in trained for answer in group]
        setting = f"{self.section}.agreement"
        line = check_agreement(
            drawn, known, bound=self.config.agreement, setting=setting, step=step
        )
        if self.rollouts == 1:
            self.run.notes.append(line)

    def samples(self, number: int) -> Sequence[Mapping[str, Any]]:
        return self.judges.files.samples(number)

    def derive(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        return deviations_of(sums, self.names) | self.reported.derived(sums)

    def state(self) -> dict[str, Any]:
        return {"reported": self.reported.state(), "rollouts": self.rollouts}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.reported.load_state(state["reported"])
        self.rollouts = state["rollouts"]
