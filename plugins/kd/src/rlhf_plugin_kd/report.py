"""After the demo: how near the student has come to its teacher on held-out rows."""

import json
from pathlib import Path
from typing import Any


def report(config: Any, folder: Path) -> None:
    """Print the divergence and the agreement before and after, and where the model is."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval/kl" in line]
    first, last = evaluations[0], evaluations[-1]
    print(f"\n{f'held-out rows, teacher {config.kd.teacher}':50}   before    after")
    for text, name, shape in (
        ("KL of the teacher from the student, nats per token", "kl", "8.3f"),
        ("tokens on which both would say the same", "agreement", "8.1%"),
    ):
        print(f"{text:50} {first[f'eval/{name}']:{shape}} {last[f'eval/{name}']:{shape}}")
    print(f"\nthe student is in {folder / 'model'}")
