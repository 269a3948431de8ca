"""Answers that a file has."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from rlhf.engine import Engine, Mesh
from rlhf.errors import RLHFError
from rlhf.hookspecs import BackendHooks
from rlhf.plugin import Config
from rlhf.trainer import Sample

FILE = "SCRIPTED_ANSWERS"
"""The variable that names a JSON file: a list with the text of an answer to each prompt."""


@frozen(kw_only=True, eq=False)
class Scripted:
    config: Config
    tokenizer: Any
    mesh: Mesh
    hooks: BackendHooks

    def sample(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int],
        max_new_tokens: int,
        max_tokens: int,
        ends: Sequence[int],
        temperature: float,
    ) -> list[Sample]:
        answers = json.loads(Path(os.environ[FILE]).read_text())
        if len(answers) != len(prompts):
            raise RLHFError(f"{FILE} has {len(answers)} answers to {len(prompts)} prompts")
        samples = []
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
            tokens = [*tokens, ends[-1]][: min(max_new_tokens, max_tokens - len(prompt))]
            samples.append(Sample(tokens, [0.0] * len(tokens), finished=tokens[-1] == ends[-1]))
        return samples
