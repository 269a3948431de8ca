"""Rewards of a rollout's answers: the calls that are made, and the total of their scores."""

import sys
from collections import Counter, deque
from collections.abc import Collection, Generator, Mapping, Sequence, Sized
from contextlib import closing
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from rlhf.errors import RLHFError, listed
from rlhf.plugin import check_model_folder, documented
from rlhf_rollouts.rewards.answers import Answers
from rlhf_rollouts.rewards.functions import ANSWER, CALL, COMMON, Call, Outcome
from rlhf_rollouts.rewards.pool import Pool, Source, Task
from rlhf_rollouts.rewards.rules import HAS_MATH_VERIFY
from rlhf_rollouts.rewards.spec import RewardSpec, address

if TYPE_CHECKING:
    import numpy as np


NOT_PASSED = ("prompt", "completion", "completion_ids")
"""Columns that functions do not get, as in TRL."""


@documented
@frozen
class Scores:
    """The rewards of the answers of a rollout, in their order."""

    by_name: "Mapping[str, np.ndarray]"
    """The score of each answer by the name of the reward [answers], float64, without its weight;
    nan where the reward did not score it."""
    total: "np.ndarray"
    """The weighted sum over the rewards that scored the answer [answers], float64; nan where none
    did."""
    columns: Mapping[str, list[Any]]
    """What functions logged with `log_extra`: plain data, one value for each answer, None where
    nothing was logged."""
    metrics: Mapping[str, tuple[float, float]]
    """What functions logged with `log_metric`: the sum over the answers of their calls, and the
    number of these."""
    weights: Mapping[str, float] = field(factory=dict)
    """The weight of each reward in the total, by its name; 1 for others."""


class Rewards:
    """Rewards that score answers in processes of their own.

    Functions are imported when the object is created, and none is called. Raises RLHFError for one
    that cannot be found, whose signature does not fit, or that does not have an option.

    `deadline` is the time of a call in seconds, `workers` the number of processes. `close` ends
    them; they also end with the process that has created the object.
    """

    def __init__(
        self, specs: Sequence[RewardSpec], *, deadline: float = 60.0, workers: int = 1
    ) -> None:
        if not specs:
            raise RLHFError("rewards is empty; add a function, a url or a model")
        for label, count in Counter(spec.label for spec in specs).items():
            if count > 1:
                raise RLHFError(f"{count} rewards are called {label!r}; set `name` of the others")
        self.specs = tuple(specs)
        self.deadline = deadline
        self._called = [spec for spec in specs if spec.model is None]
        self._pool = Pool([source(spec, deadline) for spec in self._called], workers=workers)

    @property
    def note(self) -> str:
        """A line for the start of a run: the rewards with their weights."""
        parts = (f"{spec.label} x {spec.weight:g}" for spec in self.specs)
        text = f"rewards    {', '.join(parts)}"
        if any(spec.function == "boxed" for spec in self.specs):
            how = "by math-verify" if HAS_MATH_VERIFY else "as text, without math-verify"
            text += f"; boxed compares {how}"
        return text

    def check(self) -> None:
        """Raise RLHFError for a server that does not answer, or for a reward model without a
        folder."""
        # Only a server needs the libraries of HTTP.
        from rlhf_rollouts.rewards.server import reach

        for spec in self.specs:
            if spec.url:
                reach(address(spec.url), spec.label)
            if spec.model:
                check_model_folder(spec.model, f"reward {spec.label!r}: model")

    @property
    def needed(self) -> frozenset[str]:
        """The columns of the rows that the rewards need."""
        return frozenset(name for _, names in self._needs() for name in names)

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise RLHFError unless the rows have the columns that the rewards need."""
        columns = {*columns} - {*NOT_PASSED}
        if taken := {*COMMON} & columns:
            raise RLHFError(
                f"the rows have a column {min(taken)!r}, which is an argument of every reward "
                "function; rename the column"
            )
        for spec, names in self._needs():
            for name in names:
                if name not in columns:
                    raise RLHFError(
                        f"reward {spec.label!r} needs the column {name!r}; the rows have "
                        f"{listed(sorted(columns)) or 'no columns'}"
                    )

    def _needs(self) -> list[tuple[RewardSpec, tuple[str, ...]]]:
        """Return the columns that each reward needs."""
        pairs = zip(self._called, self._pool.loaded, strict=True)
        of_functions = {spec.label: names for spec, (_, names) in pairs}
        return [(spec, (*of_functions.get(spec.label, ()), *spec.when)) for spec in self.specs]

    def __call__(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        trainer_state: Any,
        rows: Sequence[str] = (),
        scored: "Mapping[str, np.ndarray] | None" = None,
    ) -> Scores:
        """Return the scores of answers. All arguments but `trainer_state` have one entry per
        answer, and the answers to a prompt are neighbours. `rows` are where the rows came from, for
        errors. `scored` has the scores of reward models [answers] by the name of the reward.

        Raises RLHFError if a reward fails. A call that does not return before the deadline is ended
        with its process; then each of its prompts gets a call with an equal share of the deadline.
        Answers that are not scored then are unscorable, which a line on standard error says. More
        than half of them are an error.
        """
        scored, count = scored or {}, len(completions)
        texts = {"prompts": prompts, "completion_ids": completion_ids}
        lists: dict[str, Sized] = {**texts, **columns, **scored}
        lists |= {"rows": rows} if rows else {}
        for name, values in lists.items():
            if len(values) != count:
                raise RLHFError(f"{name!r} has {len(values)} entries for {count} answers")
        for spec in self.specs:
            if spec.model and spec.label not in scored:
                raise RLHFError(
                    f"reward {spec.label!r}: this trainer does not load reward models; start "
                    "`rlhf serve` with the model, and set url in place of model"
                )
        passed = {name: columns[name] for name in columns if name not in NOT_PASSED}
        self.check_columns(passed)
        ids = [list(map(int, tokens)) for tokens in completion_ids]
        answers = Answers(prompts, completions, ids, passed, rows)
        of_models = self._of_models(answers, scored)
        results = self._results(answers, plain_state(trainer_state))
        return self._scores(results, count, of_models)

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _of_models(
        self, answers: Answers, scored: "Mapping[str, np.ndarray]"
    ) -> "dict[str, np.ndarray]":
        """Return the scores of reward models, nan for rows that they do not score. Raises RLHFError
        for a score that is not finite."""
        # The commands that read a configuration do not need numpy.
        import numpy as np

        found = {}
        for spec in self.specs:
            if spec.model is None:
                continue
            places = answers.matching(spec.when)
            found[spec.label] = np.full(len(answers.completions), np.nan)
            found[spec.label][places] = np.asarray(scored[spec.label])[places]
            for place in places:
                if not np.isfinite(value := found[spec.label][place]):
                    raise RLHFError(
                        f"reward {spec.label!r}: the model returned {value} for "
                        f"{answers.name(place)}; check its weights and its dtype"
                    )
        return found

    def _results(self, answers: Answers, state: Mapping[str, Any]) -> list[tuple[Call, Outcome]]:
        """Return the outcomes of all calls that have scored, in any order. Raises RLHFError for one
        that has failed."""
        asked = [answers.matching(spec.when) for spec in self._called]
        calls = [
            answers.call(function, places)
            for function, all_places in enumerate(asked)
            for places in answers.parts(all_places)
        ]
        tasks = deque(self._tasks(calls, self.deadline))
        results: list[tuple[Call, Outcome]] = []
        lost: Counter[int] = Counter()
        failed = None
        with closing(self._outcomes(tasks, state)) as outcomes:
            for call, outcome in outcomes:
                if outcome.kind == "scored":
                    results.append((call, outcome))
                elif outcome.kind == "failed":
                    failed = call, outcome
                    break
                elif len(prompts_of := answers.by_prompt(call.places)) > 1:
                    calls = [answers.call(call.function, places) for places in prompts_of]
                    tasks.extend(self._tasks(calls, self.deadline / len(calls)))
                else:
                    lost[call.function] += len(call.places)
                    names = answers.names(call.places)
                    self._check_lost(call, names, lost[call.function], len(asked[call.function]))
        if failed is not None:
            raise self._error(*failed, answers, state)
        return results

    def _outcomes(
        self, tasks: deque[Task], state: Mapping[str, Any]
    ) -> Generator[tuple[Call, Outcome]]:
        """Return the outcomes of tasks that any worker may take."""
        return self._pool.outcomes([tasks] * len(self._pool.workers), state)

    def _tasks(self, calls: Sequence[Call], seconds: float) -> list[Task]:
        """Return calls as tasks: asynchronous ones run together, others one after the other."""
        together = [call for call in calls if self._pool.loaded[call.function][0]]
        alone = [call for call in calls if not self._pool.loaded[call.function][0]]
        tasks: list[Task] = [(together, self.deadline)] if together else []
        return tasks + [([call], seconds) for call in alone]

    def _check_lost(self, call: Call, names: str, lost: int, asked: int) -> None:
        """Say that the answers of a call, which messages call `names`, are unscorable. Raises
        RLHFError if most of them are."""
        name = self._called[call.function].label
        if 2 * lost > asked:
            raise RLHFError(
                f"reward {name!r}: did not return in time for {lost} of {asked} answers; make the "
                f"function faster, or raise the deadline of {self.deadline:g} s"
            )
        print(
            f"warning: reward {name!r}: did not return in time for {names}; they count as "
            "unscorable",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    def _error(
        self, call: Call, outcome: Outcome, answers: Answers, state: Mapping[str, Any]
    ) -> RLHFError:
        """Return the error for a call that has failed, with the answer at which it fails."""
        where = None
        if outcome.trace and len(call.places) > 1:
            # Each answer by itself shows which one it is.
            alone = [answers.call(call.function, [place]) for place in call.places]
            tasks = deque(self._tasks(alone, self.deadline / len(alone)))
            with closing(self._outcomes(tasks, state)) as outcomes:
                failing = (each for each in outcomes if each[1].trace)
                call, outcome = next(failing, (call, outcome))
            if len(call.places) > 1:
                where = f"{answers.names(call.places)}, but for none of them by itself"
        text = outcome.text.replace(ANSWER, where or answers.name(call.places[outcome.place]))
        text = text.replace(CALL, answers.names(call.places))
        error = RLHFError(f"reward {self._called[call.function].label!r}: {text}")
        if outcome.trace:
            error.add_note(outcome.trace)
        return error

    def _scores(
        self,
        results: Sequence[tuple[Call, Outcome]],
        count: int,
        scored: "Mapping[str, np.ndarray]",
    ) -> Scores:
        """Return what the calls have returned, in the order of the answers."""
        import numpy as np

        by_name = {spec.label: np.full(count, np.nan) for spec in self.specs}
        columns: dict[str, list[Any]] = {}
        sums: dict[str, float] = {}
        sizes: Counter[str] = Counter()
        for name, values in scored.items():
            by_name[name] = values
        # Calls return in any order, and a sum depends on the order.
        for call, outcome in sorted(results, key=lambda it: (it[0].function, it[0].places[0])):
            by_name[self._called[call.function].label][call.places] = outcome.values
            for name, extras in outcome.extras.items():
                column = columns.setdefault(name, [None] * count)
                for place, extra in zip(call.places, extras, strict=True):
                    column[place] = extra
            for name, mean in outcome.metrics.items():
                sums[name] = sums.get(name, 0.0) + mean * len(call.places)
                sizes[name] += len(call.places)
        total, unscored = np.zeros(count), np.ones(count, dtype=bool)
        for spec in self.specs:
            known = ~np.isnan(by_name[spec.label])
            total[known] += spec.weight * by_name[spec.label][known]
            if spec.weight:  # Without a weight it is only a metric.
                unscored &= ~known
        total[unscored] = np.nan
        metrics = {name: (sums[name], float(sizes[name])) for name in sums}
        weights = {spec.label: spec.weight for spec in self.specs}
        return Scores(by_name, total, columns, metrics, weights)


def source(spec: RewardSpec, deadline: float) -> Source:
    """Return where the function of a reward is; that of a server is one of ours."""
    if spec.url:
        options = {"url": address(spec.url), "seconds": deadline}
        return spec.label, "rlhf_rollouts.rewards.server:server", options
    return spec.label, str(spec.function), spec.options


def plain_state(state: Any) -> dict[str, Any]:
    """Return the fields of a trainer's state: of a mapping, an attrs class or another object."""
    if attrs.has(type(state)):
        return attrs.asdict(state, recurse=False)
    return dict(state if isinstance(state, Mapping) else vars(state))
