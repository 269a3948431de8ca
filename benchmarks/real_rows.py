"""Supervised fine-tuning of a small pretrained Llama on real rows, held-out loss before and after.

    python benchmarks/real_rows.py DATA --output build/real

DATA holds models/stories260K-hf and sft/{tinystories,gsm8k}.{train,eval}.jsonl(.gz). Every setting
(1 and 2 processes, ZeRO 0 and 3) runs the same steps; their curves are compared. Prints one table
and writes it to OUTPUT/real_rows.md.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SETS = ("tinystories", "gsm8k")
SETTINGS = ((1, 0), (2, 0), (1, 3), (2, 3))
"""Processes and ZeRO stage."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--output", type=Path, default=Path("build/real"))
    parser.add_argument("--steps", type=int, help="default: one epoch")
    parser.add_argument("more", nargs="*", help="more words for `rlhf run sft`, after --")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    results = [run(options, rows, nproc, stage) for rows in SETS for nproc, stage in SETTINGS]
    table = as_table(results)
    (options.output / "real_rows.md").write_text(table)
    print(table)
    return 0


def words(data: Path, rows: str, nproc: int, stage: int, output: Path) -> list[str]:
    """The words of `rlhf run sft` for one run."""
    return [
        "--model", str(data / "models" / "stories260K-hf"), "--model.dtype", "fp32",
        "--data.train", str(data / "sft" / f"{rows}.train.jsonl.gz"),
        "--data.eval", str(data / "sft" / f"{rows}.eval.jsonl"),
        "--data.max_tokens", "512", "--batch.size", "16", "--batch.tokens", "4096",
        "--optim.lr", "2e-3", "--train.eval_at_start", "true", "--checkpoint.every", "null",
        "--deepspeed.stage", str(stage), "--nproc", str(nproc),
        *(("--deepspeed.persistence_threshold", "0") if stage == 3 else ()),
        "--output", str(output), "--overwrite",
    ]  # fmt: skip


def run(options: argparse.Namespace, rows: str, nproc: int, stage: int) -> dict[str, Any]:
    folder = options.output / f"{rows}-{nproc}-zero{stage}"
    more = ["--train.steps", str(options.steps)] if options.steps else []
    command = [sys.executable, "-m", "rlhf", "run", "sft"]
    command += [*words(options.data, rows, nproc, stage, folder), *more, *options.more]
    start = time.perf_counter()
    with (options.output / f"{folder.name}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval/loss" in line]
    return {
        "rows": rows, "nproc": nproc, "stage": stage, "seconds": time.perf_counter() - start,
        "losses": [line["loss"] for line in lines if "grad_norm" in line],
        "before": evaluations[0], "after": evaluations[-1],
    }  # fmt: skip


def as_table(results: list[dict[str, Any]]) -> str:
    first = {result["rows"]: result["losses"] for result in reversed(results)}
    table = [
        "| rows | processes | ZeRO | steps | eval loss before | after "
        "| token accuracy before | after "
        "| largest difference of a step's loss from the first line's | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        before, after = result["before"], result["after"]
        pairs = zip(result["losses"], first[result["rows"]], strict=True)
        difference = max(abs(one - other) for one, other in pairs)
        table.append(
            f"| {result['rows']} | {result['nproc']} | {result['stage']} | {len(result['losses'])} "
            f"| {before['eval/loss']:.4f} | {after['eval/loss']:.4f} "
            f"| {before['eval/mean_token_accuracy']:.3f} | {after['eval/mean_token_accuracy']:.3f} "
            f"| {difference:.1e} | {result['seconds']:.0f} |"
        )
    return "\n".join(table) + "\n"


if __name__ == "__main__":
    sys.exit(main())
