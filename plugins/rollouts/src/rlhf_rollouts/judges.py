"""The rewards of a rollout: functions and servers on rank 0, reward models on all ranks."""

import json
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs

from rlhf.errors import RLHFError
from rlhf.trainer import Example, Run, Sample
from rlhf_rollouts.files import Rollout, RolloutFiles
from rlhf_rollouts.reward_models import RewardModels
from rlhf_rollouts.rewards import Rewards, RewardSpec, Scores
from rlhf_rollouts.rewards.rules import text_of
from rlhf_rollouts.tools.rewards import ENVIRONMENT

PROMPT = "prompt"


def kept_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that JSON can hold: what rewards get of it."""
    kept = {}
    for name, value in row.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):  # Such as an image or a date.
            continue
        kept[name] = value
    return kept


class Judges:
    """All rewards of a run, which are written into its folder with the answers. Collective to
    create and to call."""

    def __init__(
        self,
        run: Run,
        specs: Sequence[RewardSpec],
        rewards: Rewards | None,
        *,
        serves: int | None = None,
        same_prompts: bool = True,
    ) -> None:
        """Load the reward models of `specs`. `rewards` are those of rank 0, None on other ranks;
        the others are as in `RolloutFiles`."""
        self.files = RolloutFiles(run, serves=serves, same_prompts=same_prompts)
        self._run, self._rewards = run, rewards
        if self._rewards is not None:
            run.notes.append(self._rewards.note)
            weakref.finalize(self, self._rewards.close)
        self._models = RewardModels(run, specs)
        first = (file[0].columns for part in run.examples for file in part.files)
        self._columns = [*dict.fromkeys(name for columns in first for name in columns)]

    def __call__(
        self,
        examples: Sequence[Example],
        groups: Sequence[Sequence[Sample]],
        step: int,
        *,
        seeds: Sequence[int],
        training: bool,
        completions: Sequence[Sequence[Any]] | None = None,
        environment: Callable[[], Sequence[float | None]] | None = None,
    ) -> Scores:
        """Return the scores of the answers in `groups`, one group for each example, and record
        them. `completions` are the answers as messages, if they have several turns, and
        `environment` returns what environments say of each. The other arguments are as in
        `Rollout`. If a reward fails, the answers are recorded without scores, and RLHFError is
        raised. Collective."""
        prompts, texts = texts_of(examples, groups, self._run.tokenizer)
        rollout = Rollout(
            examples=examples, groups=groups,
            texts=[text_of(answer) for group in texts for answer in group],
            scores=None, step=step, seeds=seeds, training=training,
        )  # fmt: skip
        with self.files.kept_if_unjudged(rollout):
            scores = self._judged(rollout, prompts, completions or texts, environment)
        self.files.write(attrs.evolve(rollout, scores=scores))
        return scores

    def _judged(
        self,
        rollout: Rollout,
        prompts: Sequence[Any],
        completions: Sequence[Sequence[Any]],
        environment: Callable[[], Sequence[float | None]] | None,
    ) -> Scores:
        counts = [len(group) for group in rollout.groups]
        columns = self._repeated_columns(rollout.examples, counts)
        if environment is not None:
            columns[ENVIRONMENT] = list(environment())
        prompts = repeated(prompts, counts)
        answers = [text for group in completions for text in group]
        tools = repeated([example.columns.get("tools") for example in rollout.examples], counts)
        scored = self._models(prompts, answers, tools, columns)

        def judged() -> Scores:
            assert self._rewards is not None, "rank 0 has started them"
            return self._rewards(
                prompts=prompts,
                completions=answers,
                completion_ids=[sample.tokens for group in rollout.groups for sample in group],
                columns=columns,
                trainer_state={"global_step": rollout.step, "max_steps": self._run.steps},
                rows=repeated([example.row for example in rollout.examples], counts),
                scored=scored,
            )

        return self._run.on_rank_zero(judged)

    def _repeated_columns(
        self, examples: Sequence[Example], counts: Sequence[int]
    ) -> dict[str, list[Any]]:
        """Return the columns of all rows, with a value for each answer; in each call those of the
        first rows, whichever rows it has."""
        names = dict.fromkeys(name for example in examples for name in example.columns)
        return {
            name: repeated([example.columns.get(name) for example in examples], counts)
            for name in dict.fromkeys([*self._columns, *names])
        }


def started(run: Run, specs: Sequence[RewardSpec], **options: Any) -> Rewards:
    """Start the processes of reward functions. Raises RLHFError for a function that cannot be
    loaded, a server that does not answer, or rows without a column that is needed. `options` are
    those of `Rewards`."""
    rewards = Rewards(specs, **options)
    for setting, part in zip(("data.train", "data.eval"), run.examples, strict=False):
        for file in part.files:
            try:
                rewards.check_columns(columns_of(file, rewards.needed) - {PROMPT})
            except RLHFError as error:
                raise RLHFError(f"{setting}: {error}") from error
    rewards.check()
    return rewards


def columns_of(rows: Any, needed: Collection[str]) -> set[str]:
    """Return the columns of examples, of the first of them that have the `needed` ones together
    if there are such."""
    names: set[str] = set()
    for number in range(len(rows)):
        names.update(rows[number].columns)
        if names.issuperset(needed):
            break
    return names


def texts_of(
    examples: Sequence[Example], groups: Sequence[Sequence[Sample]], tokenizer: Any
) -> tuple[list[Any], list[list[Any]]]:
    """Return the prompts and the answers to each as rewards read them: text, or messages if the
    prompt is a conversation."""
    prompts = [example.columns[PROMPT] for example in examples]
    texts = [
        [tokenizer.decode(list(sample.tokens), skip_special_tokens=True) for sample in group]
        for group in groups
    ]
    completions = [
        list(group) if isinstance(prompt, str) else [said(text) for text in group]
        for prompt, group in zip(prompts, texts, strict=True)
    ]
    return prompts, completions


def said(text: str) -> list[dict[str, str]]:
    """Return an answer as a list of one message."""
    return [{"role": "assistant", "content": text}]


def repeated(values: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    """Return each value as often as its count says."""
    pairs = zip(values, counts, strict=True)
    return [value for value, count in pairs for _ in range(count)]
