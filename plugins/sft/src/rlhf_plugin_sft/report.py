"""After the demo: how many held-out problems the model solves before and after, and what it
writes."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.demo import Problem, base_model_folder, problems

NUM_PROBLEMS = 100
SAMPLES = 3


def report(config: Any, folder: Path) -> None:
    """Print the held-out loss and the exact answers before and after, three samples, and where the
    model is."""
    asked = list(islice(problems("eval"), NUM_PROBLEMS))
    before = answers(base_model_folder(), asked)
    after = answers(folder / "model", asked)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    print("\nheld-out problems       before    after")
    print(f"loss per token        {losses[0]:8.3f} {losses[-1]:8.3f}")
    print(f"exact answers, of {len(asked):3d} {exact(before, asked):8d} {exact(after, asked):8d}")
    for problem, written in islice(zip(asked, after, strict=True), SAMPLES):
        verdict = "right" if exact([written], [problem]) else f"wrong, it is {problem.answer}"
        print(f"\n> {problem.question}\n{written}\n  ({verdict})")


def answers(model_folder: Path, asked: list[Problem]) -> list[str]:
    """What the model in this folder answers, greedily, through plain transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    conversations = [[{"role": "user", "content": problem.question}] for problem in asked]
    prompts = tokenizer.apply_chat_template(
        conversations,
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        padding=True,
    )
    with torch.no_grad():
        written = model.generate(**prompts, max_new_tokens=48, do_sample=False)
    return tokenizer.batch_decode(
        written[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True
    )


def exact(written: list[str], asked: list[Problem]) -> int:
    """How many end with the right answer."""
    wanted = (problem.steps[-1] for problem in asked)
    return sum(text.strip().endswith(end) for text, end in zip(written, wanted, strict=True))
