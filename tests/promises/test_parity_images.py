"""The same losses and norms of gradients as TRL's trainers on rows with images, to 1e-5.

`parity/images.json` has what they logged over three steps on rows of `demo:shapes`;
`benchmarks/parity_images.py` writes it.
"""

import json
from pathlib import Path

import pytest

from rlhf_devkit import column
from rlhf_devkit.ranks import Ranks
from rlhf_devkit.tiny import run, write_rows
from rlhf_vision import demo

PEER = json.loads((Path(__file__).parents[1] / "parity" / "images.json").read_text())


@pytest.mark.parametrize(("trainer", "format"), [("sft", "demonstration"), ("dpo", "preference")])
def test_losses_and_gradients_of_rows_with_images_are_those_of_the_peer(
    tmp_path: Path, one: Ranks, trainer: str, format: str
) -> None:
    rows = demo.rows("train", format)[: PEER["rows"]]
    file, expected = write_rows(tmp_path / "rows.jsonl", rows), PEER[trainer]
    words = [
        "--model", "demo:shapes", "--model.dtype", "fp32", "--data.train", str(file),
        "--data.eval", "[]", "--data.workers", "0", "--batch.size", str(PEER["rows"]),
        "--batch.tokens", "300", "--train.steps", str(len(expected)), "--optim.warmup", "0",
        "--optim.lr", str(PEER["rate"]), "--optim.schedule", "constant", "--output",
        str(tmp_path / "run"),
    ]  # fmt: skip
    lines = one.run(run, trainer, words, str(tmp_path / "cache"))[0]
    for name in ("loss", "grad_norm"):
        assert column(lines, name) == pytest.approx([line[name] for line in expected], rel=1e-5)
    assert column(lines, "loss")[-1] < column(lines, "loss")[0]
