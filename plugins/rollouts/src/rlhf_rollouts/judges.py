"""The rewards of a rollout: functions and servers on rank 0, reward models on all ranks."""

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.trainer import Example, Run, Sample
from rlhf_rollouts.reward_models import RewardModels
from rlhf_rollouts.rewards import Rewards, RewardSpec, Scores

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
    """All rewards of a run. Collective to create and to call."""

    def __init__(self, run: Run, specs: Sequence[RewardSpec], rewards: Rewards | None) -> None:
        """Load the reward models of `specs`. `rewards` are those of rank 0, None on other ranks."""
        self._run, self._rewards = run, rewards
        if self._rewards is not None:
            run.notes.append(self._rewards.note)
            weakref.finalize(self, self._rewards.close)
        self._models = RewardModels(run, specs)
        first = (file[0].columns for part in run.examples for file in part.files)
        self._columns = [*dict.fromkeys(name for columns in first for name in columns)]

    def __call__(
        self, examples: Sequence[Example], groups: Sequence[Sequence[Sample]], step: int
    ) -> Scores:
        """Return the scores of the answers in `groups`, one group for each example. Raises
        RLHFError if a reward fails. Collective."""
        prompts, completions = texts_of(examples, groups, self._run.tokenizer)
        counts = [len(group) for group in groups]
        repeated_prompts = repeated(prompts, counts)
        answers = [text for group in completions for text in group]
        scored = self._models(repeated_prompts, answers)
        # The same columns in each call, whichever rows it has.
        columns = {
            name: repeated([example.columns.get(name) for example in examples], counts)
            for name in self._columns
        }

        def judged() -> Scores:
            assert self._rewards is not None, "rank 0 has started them"
            return self._rewards(
                prompts=repeated_prompts,
                completions=answers,
                completion_ids=[sample.tokens for group in groups for sample in group],
                columns=columns,
                trainer_state={"global_step": step, "max_steps": self._run.steps},
                scored=scored,
            )

        result: Scores = self._run.on_rank_zero(judged)
        return result


def started(run: Run, specs: Sequence[RewardSpec], **options: Any) -> Rewards:
    """Start the processes of reward functions. Raises RLHFError for a function that cannot be
    loaded, a server that does not answer, or rows without a column that is needed. `options` are
    those of `Rewards`."""
    rewards = Rewards(specs, **options)
    for part in run.examples:
        for file in part.files:
            rewards.check_columns(set(file[0].columns) - {PROMPT})
    rewards.check()
    return rewards


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
