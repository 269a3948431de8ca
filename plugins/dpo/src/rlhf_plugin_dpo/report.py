"""After the demo: what the held-out pairs say before and after."""

import json
from pathlib import Path
from typing import Any

SHOWN = {
    "rewards/accuracies": "chosen answer has the higher reward",
    "rewards/margins": "reward of chosen less rejected",
    "logps/chosen": "log-probability of chosen",
    "logps/rejected": "log-probability of rejected",
    "loss": "loss",
}


def report(config: Any, folder: Path) -> None:
    """Print the held-out metrics before and after, and where the model is."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    before, *_, after = [line for line in lines if "eval/loss" in line]
    width = max(map(len, SHOWN.values()))
    print(f"\n{'held-out pairs':{width}}   before    after")
    for name, what in SHOWN.items():
        print(f"{what:{width}} {before[f'eval/{name}']:8.3f} {after[f'eval/{name}']:8.3f}")
