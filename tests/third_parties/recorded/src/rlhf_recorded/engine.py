"""Answers that were recorded, by prompt."""

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

FILE = "RECORDED_ANSWERS"
"""The variable that names a JSON file: for each prompt its answer, both as texts."""


@frozen(kw_only=True, eq=False)
class Recorded:
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
        samples = []
        for prompt in prompts:
            text = self.tokenizer.decode(list(prompt), skip_special_tokens=True)
            if text not in answers:
                raise RLHFError(f"{os.environ[FILE]} has no answer to {text!r}")
            tokens = self.tokenizer(answers[text], add_special_tokens=False)["input_ids"]
            tokens = [*tokens, ends[-1]][: min(max_new_tokens, max_tokens - len(prompt))]
            samples.append(Sample(tokens, [0.0] * len(tokens), finished=tokens[-1] == ends[-1]))
        return samples
