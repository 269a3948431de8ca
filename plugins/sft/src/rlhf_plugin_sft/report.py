"""The report after the demo: how many held-out problems the model solves before and after, and
some of its answers."""

from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_demo import Problem, base_model_folder, print_before_and_after, problems

NUM_PROBLEMS = 100
SAMPLES = 3


def report(config: Any, folder: Path) -> None:
    """Print the held-out loss and the number of right answers before and after, and three
    answers."""
    held_out = list(islice(problems("eval"), NUM_PROBLEMS))
    before = answers(base_model_folder(), held_out)
    after = answers(folder / "model", held_out)
    title = "held-out problems".ljust(len("right answers, of 100"))
    print_before_and_after(folder, title, {"loss": ("loss per token", "8.3f")})
    solved = [num_solved(texts, held_out) for texts in (before, after)]
    print(f"right answers, of {len(held_out):3d} {solved[0]:8d} {solved[1]:8d}")
    for problem, text in islice(zip(held_out, after, strict=True), SAMPLES):
        verdict = "right" if num_solved([text], [problem]) else f"wrong: it is {problem.answer}"
        print(f"\n> {problem.question}\n{text}\n  ({verdict})")


def answers(model_folder: Path, held_out: list[Problem]) -> list[str]:
    """Return the greedy answers of the model in a folder, from plain transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    conversations = [[{"role": "user", "content": problem.question}] for problem in held_out]
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


def num_solved(texts: list[str], held_out: list[Problem]) -> int:
    """Return how many texts end with the right answer."""
    ends = (problem.steps[-1] for problem in held_out)
    return sum(text.strip().endswith(end) for text, end in zip(texts, ends, strict=True))
