"""Rewards by the frozen reward models of a run, on all of its ranks."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor

from rlhf.engine import Engine
from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf.plugin import ModelConfig
from rlhf.readouts import scores
from rlhf.trainer import Example, PackedBatch, Run
from rlhf_rollouts.rewards import RewardSpec
from rlhf_rollouts.rewards.answers import Answers
from rlhf_rows import encode

__all__ = ["RewardModels"]

HEAD = "ForSequenceClassification"
"""What the classes of transformers end with that score a text."""


class RewardModels:
    """The reward models among `specs`, loaded as frozen models of a run. Collective.

    They have the policy's precision. A prompt and its answer are tokenised as in the training of
    the reward model, by its own tokenizer. Rewards are normalised if its run wanted them so
    (`rm.normalise`).
    """

    def __init__(self, run: Run, specs: Sequence[RewardSpec]) -> None:
        self._run = run
        self._models: list[tuple[RewardSpec, Engine, Any, tuple[float, float]]] = []
        own = run.config.model
        for spec in specs:
            if spec.model is not None:
                if any(part.with_inputs.any() for part in run.examples):
                    raise RLHFError(
                        f"reward {spec.label!r}: a reward model gets text only, and the prompts "
                        "have images; use a reward function"
                    )
                model = ModelConfig(
                    path=spec.model, dtype=own.dtype, trust_remote_code=own.trust_remote_code
                )
                check_head(run.load_architecture(spec.label, model=model), spec)
                engine = run.load(spec.label, model=model, task="sequence", trained=False)
                scale = mean_and_deviation(engine.module.causal.config, spec)
                self._models.append((spec, engine, run.load_tokenizer(model), scale))

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        tools: Sequence[Any] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Return the rewards of answers by the name of the reward [answers], float64, nan where
        `when` of the reward excludes the row: the argument `scored` of `Rewards`. Texts or messages
        have one entry per answer, the same on every rank, and the answers to a prompt are
        neighbours. `tools` are the JSON schemas that conversations have, as a list, as JSON text or
        None for each answer, and `columns` those of the rows that `when` needs. Raises RLHFError if
        a model's chat template ignores tools. Collective."""
        answers = Answers(prompts, completions, (), columns or {})
        triples = [*zip(prompts, completions, tools or [None] * len(prompts), strict=True)]
        scored = {}
        for spec, engine, tokenizer, (mean, deviation) in self._models:
            scored[spec.label] = np.full(len(triples), np.nan)
            places = answers.matching(spec.when)
            chosen = [triples[place] for place in places]
            examples = [
                example_of(tokenizer, prompt, [it[1] for it in group], schemas, name=spec.label)
                for (prompt, schemas), group in groupby(chosen, lambda it: (it[0], it[2]))
            ]
            if examples:
                read = self._run.read(examples, partial(rewards_of, engine), per="answer")
                values = np.concatenate([np.asarray(each, dtype=float) for each in read])
                scored[spec.label][places] = (values - mean) / deviation
        return scored


def example_of(
    tokenizer: Any, prompt: Any, answers: Sequence[Any], tools: Any = None, *, name: str
) -> Example:
    """Return a prompt and its answers as the reward model `name` reads them."""
    tools = json.loads(tools) if isinstance(tools, str) else tools
    try:
        row = encode(tokenizer, prompt, *answers, tools=tools or None, renders_whole=True)
    except RLHFError as error:
        raise SameOnAllRanks(f"reward {name!r}: {error}") from error
    return Example(row.prompt, row.answers)


def rewards_of(engine: Engine, batch: PackedBatch) -> Tensor:
    """Return the reward of each answer [A]."""
    return engine(batch, scores)["scores"]


def check_head(architecture: Any, spec: RewardSpec) -> None:
    """Raise RLHFError for a model that would get a new head with random values."""
    names = getattr(architecture, "architectures", None) or ["a model without a head"]
    if not names[0].endswith(HEAD):
        raise RLHFError(
            f"reward {spec.label!r}: {spec.model} is {names[0]} and no reward model (...{HEAD}); "
            "train one from it with rlhf run rm"
        )


def mean_and_deviation(config: Any, spec: RewardSpec) -> tuple[float, float]:
    """Return by what the rewards of a model are normalised: 0 and 1 unless its run wanted it."""
    if not getattr(config, "reward_normalise", False):
        return 0.0, 1.0
    if config.reward_mean is None:
        raise RLHFError(
            f"reward {spec.label!r}: {spec.model} has no reward_mean in its config.json, because "
            "its run had no held-out rows; set data.eval in that run"
        )
    return config.reward_mean, max(config.reward_std, 1e-8)
