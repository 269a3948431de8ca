"""Speed and memory of `rlhf run sft` itself, read from what the run writes.

    python benchmarks/throughput.py --rows chats.jsonl.gz --shape 1.5b --stages 2 3 --output out

One line per setting: the median over the steps after the first four of tokens per second and MFU
(useful tokens only, causal attention counted as half), and the peak memory. The same in
`out/throughput.json` and `out/throughput.md`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from model_folder import SHAPES, make

WARM_UP = 4


def main() -> int:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    model = options.output / f"model-{options.shape}"
    make(model, shape=options.shape, rows=options.rows)
    results = [
        measure(options, model, stage, nproc) for nproc in options.nproc for stage in options.stages
    ]
    (options.output / "throughput.json").write_text(json.dumps(results, indent=1))
    table = as_table(results)
    (options.output / "throughput.md").write_text(table)
    print(table)
    return int(any(result["code"] for result in results))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", type=Path, required=True, help="conversations or preference pairs"
    )
    parser.add_argument("--column", default="messages", help="the column with the conversation")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--stages", type=int, nargs="+", default=[0])
    parser.add_argument("--nproc", type=int, nargs="+", default=[1])
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=18_432)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--output", type=Path, default=Path("build/throughput"))
    parser.add_argument("more", nargs="*", help="more words for `rlhf run sft`, after --")
    return parser.parse_args()


def measure(options: argparse.Namespace, model: Path, stage: int, nproc: int) -> dict[str, Any]:
    """One run in a process of its own."""
    run = options.output / f"{options.shape}-zero{stage}-{nproc}"
    entry = json.dumps({"path": str(options.rows), "columns": {"messages": options.column}})
    words = [
        "--model.path", str(model), "--model.init", "random", "--model.dtype", options.dtype,
        "--data.train", entry, "--sft.train_on", "everything", "--data.max_tokens", "4096",
        "--batch.size", str(options.size), "--batch.tokens", str(options.tokens),
        "--train.steps", str(options.steps), "--checkpoint.every", "null",
        "--deepspeed.stage", str(stage), "--nproc", str(nproc),
        "--output", str(run), "--overwrite", *options.more,
    ]  # fmt: skip
    start = time.perf_counter()
    with (options.output / f"{run.name}.log").open("w") as log:
        code = subprocess.call(
            [sys.executable, "-m", "rlhf", "run", "sft", *words], stdout=log, stderr=log
        )
    result: dict[str, Any] = {"shape": options.shape, "stage": stage, "ranks": nproc, "code": code}
    result["seconds"] = round(time.perf_counter() - start, 1)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "tokens_per_s" in line]
    result["losses"] = [line["loss"] for line in steps]
    for name in ("tokens_per_s", "mfu", "peak_memory_gib"):
        values = [line[name] for line in steps[WARM_UP:] if name in line]
        if values:
            result[name] = statistics.median(values)
    return result


def as_table(results: list[dict[str, Any]]) -> str:
    rows = ["| shape | ZeRO | ranks | tokens/s | MFU | peak GiB per rank | last loss |"]
    rows.append("|---|---|---|---|---|---|---|")
    for result in results:
        mfu = f"{result['mfu']:.3f}" if "mfu" in result else "-"
        peak = f"{result['peak_memory_gib']:.1f}" if "peak_memory_gib" in result else "-"
        rows.append(
            f"| {result['shape']} | {result['stage']} | {result['ranks']} "
            f"| {result.get('tokens_per_s', 0):,.0f} | {mfu} | {peak} "
            f"| {result['losses'][-1] if result['losses'] else '-'} |"
        )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
