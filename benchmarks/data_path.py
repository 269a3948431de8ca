"""How fast the data path is beside what bounds it: planning an epoch, packing, and tokenising
against the bare tokenizer.

python benchmarks/data_path.py [TOKENIZER FILE]     a tokenizer's folder and a file of text rows or
conversations
"""

import gc
import gzip
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from rlhf.config.sections import Config, DataConfig, DataEntry
from rlhf.data.example import Answer, Example
from rlhf.data.layout import costs, layout, steps
from rlhf.data.mapping import RowsToTrees
from rlhf.data.packing import pack
from rlhf.trainer import Trainer

ROWS, SIZE, TOKENS = 1_000_000, 128, 16_384


def main() -> None:
    for ranks in (1, 2, 8):
        print(f"plan of {ROWS:,} rows on {ranks} ranks: {plan_seconds(ranks):.2f} s")
    print(f"packing: {packing_rate() / 1e6:.1f} M tokens/s")
    if len(sys.argv) == 3:
        ours, bare = tokenising_rates(sys.argv[1], Path(sys.argv[2]))
        print(
            f"tokenising in one process: {ours:,.0f} rows/s, "
            f"bare tokenizer {bare:,.0f}, ratio {ours / bare:.2f}"
        )


def plan_seconds(ranks: int) -> float:
    """Seconds to plan an epoch: every step and its layout."""
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(5.5, 0.8, ROWS).astype(np.int64) + 8, 4096)
    start = time.perf_counter()
    for rows in steps(ROWS, SIZE, 0, 0):
        chosen = lengths[rows]
        layout(chosen, ranks, TOKENS, costs(chosen, chosen))
    return time.perf_counter() - start


def packing_rate() -> float:
    """Tokens per second of `pack` on micro-batches of pairs."""
    draw = np.random.default_rng(0)

    def tokens(size: int) -> Any:
        return draw.integers(0, 1000, size, dtype=np.int32)

    rows = [Example(tokens(200), [Answer(tokens(150)), Answer(tokens(120))]) for _ in range(32)]
    start, rounds = time.perf_counter(), 200
    for _ in range(rounds):
        batch = pack(rows, range(32))
    return rounds * len(batch.tokens) / (time.perf_counter() - start)


def tokenising_rates(tokenizer_path: str, path: Path) -> tuple[float, float]:
    """Return the rows per second from file to examples, and of only the tokenizer on the same
    texts."""
    from transformers import AutoTokenizer

    from rlhf.data.files import Source
    from rlhf.data.rows import load_format

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    lines = (gzip.open if path.suffix == ".gz" else open)(path, "rt").readlines()
    rows = [json.loads(line) for line in lines]
    texts = [
        row["text"]
        if "text" in row
        else tokenizer.apply_chat_template(row["messages"], tokenize=False)
        for row in rows
    ]
    with tempfile.TemporaryDirectory() as folder:
        source = Source(DataEntry(path=str(path)), "train", "demonstration")
        table = source.read(Path(folder)).with_format("arrow")
        config = Config(data=DataConfig(max_tokens=1 << 20))
        work = RowsToTrees(
            source,
            np.arange(len(rows)),
            config.data,
            Demonstrations(Empty(), tokenizer),
            load_format("demonstration").open(
                tokenizer, whole=False, section=Empty(), template="", images=None
            ),
        )
        gc.freeze()  # As rlhf.data.tokenise does.
        start = time.perf_counter()
        for first in range(0, len(rows), 256):
            indices = range(first, min(first + 256, len(rows)))
            work(table[indices.start : indices.stop], list(indices))
        ours = time.perf_counter() - start
    start = time.perf_counter()
    for first in range(0, len(texts), 256):
        tokenizer(texts[first : first + 256], add_special_tokens=False)["input_ids"]
    return len(rows) / ours, len(rows) / (time.perf_counter() - start)


@frozen
class Empty:
    """A trainer's section without settings."""


class Demonstrations(Trainer):
    """A trainer that takes rows as they come."""

    row_format = "demonstration"

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Any) -> None:
        raise NotImplementedError

    def loss(self, batch: Any) -> Any:
        raise NotImplementedError


if __name__ == "__main__":
    main()
