"""The report after the demo: how many held-out sums are right without the heads and with them."""

from pathlib import Path
from typing import Any

import rlhf_demo
from rlhf_demo import print_before_and_after
from rlhf_plugin_ilql.generation import Guided

SHOWN = {
    "losses/loss_q": ("loss of Q", "8.3f"),
    "losses/loss_v": ("loss of V", "8.3f"),
    "losses/loss_awac": ("loss of the language model", "8.3f"),
}
BETAS = (0.0, 1.0, 4.0)


def report(config: Any, folder: Path) -> None:
    """Print the losses before and after, and the share of right answers for several betas."""
    print_before_and_after(folder, "held-out answers", SHOWN)
    for beta, share in accuracies(folder / "model").items():
        print(f"right sums with beta {beta:g}: {share:6.1%}")


def accuracies(folder: Path) -> dict[float, float]:
    """Return for each of BETAS the share of held-out sums whose most likely answer is right."""
    guided, rows = Guided(folder), rlhf_demo.rows("arithmetic", "eval", "rewarded")
    prompts = [row["prompt"] for row in rows]
    right = [row["completions"][row["rewards"].index(1.0)] for row in rows]
    shares = {}
    for beta in BETAS:
        found = guided.answers(prompts, beta=beta, max_new_tokens=6, do_sample=False)
        pairs = zip(found, right, strict=True)
        shares[beta] = sum(one.strip() == other.strip() for one, other in pairs) / len(rows)
    return shares
