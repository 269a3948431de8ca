"""Answers from a live engine, safe on every rank at every stage."""

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from rlhf.engine import Engine
from rlhf.gateway import BackendGateway


def generate(
    engine: Engine,
    prompts: list[list[int]],
    hooks: BackendGateway,
    tokenizer: Any,
    *,
    max_new_tokens: int,
) -> list[list[int]]:
    """Greedy answers to `prompts` (token ids), without the prompt and without EOS. Collective."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    rows = [torch.tensor(prompt) for prompt in prompts]
    tokens = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence(
        [torch.ones_like(row) for row in rows], batch_first=True, padding_side="left"
    )
    with torch.no_grad(), hooks.generation_context(engine=engine) as keywords:
        out = engine.module.model.generate(
            input_ids=tokens.to(engine.device),
            attention_mask=mask.to(engine.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=pad,
            eos_token_id=tokenizer.eos_token_id,
            **keywords,
        )
    answers = out[:, tokens.shape[1] :].tolist()
    return [answer[: _end(answer, tokenizer.eos_token_id)] for answer in answers]


def _end(answer: list[int], eos: int) -> int:
    return answer.index(eos) if eos in answer else len(answer)
