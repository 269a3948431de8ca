"""Speed and memory of the six workflows through `rlhf run` itself, a peer beside them in turns.

    python benchmarks/workflows.py
    python benchmarks/workflows.py dpo rm --shape 1.5b --pairs pairs.jsonl.gz --peer python --liger

The first takes a tiny shape on the CPU. Each run is a process of its own. Weights are random in a
shape of Qwen2.5, so nothing is downloaded; rows are the embedded demo's, or `--pairs` ({"chosen",
"rejected"} of messages, for all but prm) and `--stepwise` ({"prompt", "completions", "labels"}).
Numbers come from metrics.jsonl, medians of the steps after the fourth; a row is a conversation
(sft, kd), a pair (dpo, rm), a completion (kto) or a solution (prm). `--peer` is a Python that has
TRL: the same rows, weights, rows a step and precision of the weights; with `--packed 4x4096` its
sft packs them into four rows of 4,096 tokens a step. With `--system OpenRLHF`, which runs at ZeRO 2
with fp32 masters, `--peer` is a Python that has it. With `--nproc N` TRL runs on as many ranks at
the same ZeRO stage, through transformers' integration of DeepSpeed. Words after `--` go to every
`rlhf run`, which is ended after its last step: what it saves is not measured. One table, also in
`OUTPUT/workflows.md` and `workflows.json`.

With a shape of Qwen3-VL each row has an image of 256 to 1,536 patches, which this script draws, and
rows of more than 3,000 characters are left out. Both sides train language and projector.

    python benchmarks/workflows.py --shape 1.5b --steps 1 --rounds 2 --cold --peer python --liger

measures only the time to the first step, in each round: the first round of each workflow begins
with empty caches.
"""

import argparse
import gzip
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_folder import SHAPES, VISION, VOCABULARY, make

import rlhf_demo

ADAPTED = {"sft", "dpo"}
"""Workflows that `--lora` is for."""
SIZES = {"sft": 128, "dpo": 64, "rm": 64, "kd": 64, "kto": 128, "prm": 64}
"""Rows a step."""
TINY = 32_000
"""Vocabulary of the tiny shape."""
LETTERS = 3000
"""Of both sides of a pair with an image."""
WARM_UP = 4
PEERS = {"TRL": "peer_trl.py", "OpenRLHF": "peer_openrlhf.py"}
"""Scripts beside this file."""
Row = dict[str, Any]


def main() -> int:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    write_inputs(options)
    results = []
    for workflow in options.workflows or SIZES:
        for _ in range(options.rounds):
            for side in (ours, peer) if options.peer else (ours,):
                results.append(side(options, workflow))
                (options.output / "workflows.json").write_text(json.dumps(results, indent=1))
    table = as_table(results)
    (options.output / "workflows.md").write_text(table)
    print(table)
    failed = [result for result in results if result["code"]]
    for result in failed:
        print("{who} {workflow} ended with {code}: {error}".format(**result), file=sys.stderr)
    return int(bool(failed))


def write_inputs(options: argparse.Namespace) -> None:
    """Rows and models that both sides read."""
    write_rows(options)
    tokenizer_rows = options.output / "sft.jsonl"
    vocabulary = options.vocabulary or (TINY if options.shape == "tiny" else VOCABULARY)
    shapes = {"model": options.shape, "teacher": options.teacher_shape}
    if "kd" not in (options.workflows or SIZES):
        del shapes["teacher"]
    for seed, (name, shape) in enumerate(shapes.items()):
        folder = options.output / name
        make(folder, shape=shape, rows=tokenizer_rows, vocabulary=vocabulary)
        make_weights(folder, options.dtype, seed=seed)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workflows", nargs="*", help=f"of {' '.join(SIZES)}; default all")
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--stepwise", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--teacher-shape", choices=SHAPES, default="tiny")
    parser.add_argument("--vocabulary", type=int, help="of the head; default that of the shape")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--stage", default="0", help="ZeRO stage")
    parser.add_argument("--nproc", default="1")
    parser.add_argument("--size", type=int, help="rows a step; default by workflow")
    parser.add_argument("--tokens", default="auto", help="tokens of a micro-batch")
    parser.add_argument(
        "--max-tokens", type=int, default=1024, help="of a row; longer ones are cut"
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="caches of each workflow's own")
    parser.add_argument("--peer", help="a Python with TRL or OpenRLHF")
    parser.add_argument("--system", choices=PEERS, default="TRL", help="of the peer")
    parser.add_argument("--accumulate", type=int, default=1, help="the peer's micro-batches a step")
    parser.add_argument("--attention", default="sdpa", help="the peer's attention")
    parser.add_argument("--packed", default="", help="ROWSxTOKENS of the peer's packed sft")
    parser.add_argument("--liger", action="store_true", help="the peer runs with Liger's kernels")
    parser.add_argument("--lora", type=int, help="rank of an adapter, for sft and dpo")
    parser.add_argument("--quantize", choices=["nf4"], help="the adapter's base, in 4 bits")
    parser.add_argument("--output", type=Path, default=Path("build/workflows"))
    own = sys.argv[1:]
    cut = own.index("--") if "--" in own else len(own)
    options = parser.parse_args(own[:cut])
    options.more = own[cut + 1 :]
    options.program = ["-m", "rlhf"]
    unknown = set(options.workflows) - set(SIZES)
    if unknown:
        parser.error(
            f"no such workflow: {', '.join(sorted(unknown))}; there are {', '.join(SIZES)}"
        )
    others = {*(options.workflows or SIZES)} - ADAPTED
    if options.lora and (others or options.system != "TRL"):
        parser.error(f"--lora is for {' and '.join(sorted(ADAPTED))}, beside TRL")
    if options.quantize and not options.lora:
        parser.error("--quantize needs --lora")
    if options.peer and options.nproc != "1" and options.system != "TRL":
        parser.error("on several ranks the peer is TRL")
    return options


def write_rows(options: argparse.Namespace) -> None:
    """One file for each workflow, in a shape that both sides read."""
    pairs = (
        read(options.pairs)
        if options.pairs
        else rlhf_demo.rows("arithmetic", "train", "preference")
    )
    pairs = [as_messages(row) for row in pairs]
    if options.shape in VISION:
        pairs = with_images(pairs, options.output / "images")
    steps = (
        read(options.stepwise)
        if options.stepwise
        else rlhf_demo.rows("arithmetic", "train", "stepwise")
    )
    images = [{"images": row["images"]} if "images" in row else {} for row in pairs]
    halves = [
        more
        | {"prompt": row["chosen"][:-1], "completion": row[side][-1:], "label": side == "chosen"}
        for row, more in zip(pairs, images, strict=True)
        for side in ("chosen", "rejected")
    ]
    chosen = [{"messages": row["chosen"]} | more for row, more in zip(pairs, images, strict=True)]
    files: Mapping[str, Sequence[Row]] = {
        "sft": chosen,
        "kd": chosen,
        "dpo": pairs,
        "rm": pairs,
        "kto": halves,
        "prm": [as_text(row) for row in steps],
    }
    for name, rows in files.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (options.output / f"{name}.jsonl").write_text(lines)


def with_images(pairs: list[Row], folder: Path) -> list[Row]:
    """Return the shorter pairs, each with the path of an image of its own that is drawn here."""
    import numpy as np
    from PIL import Image

    folder.mkdir(exist_ok=True)
    sizes = [
        (16 * wide, 16 * high)
        for wide in range(8, 65, 2)
        for high in range(8, 65, 2)
        if 256 <= wide * high <= 1536
    ]
    draw = np.random.default_rng(0)
    rows = [row for row in pairs if sum(map(_letters, row.values())) <= LETTERS]
    for number, row in enumerate(rows):
        coarse = Image.fromarray(draw.integers(0, 256, (8, 8, 3), np.uint8))
        path = folder / f"{number}.jpg"
        coarse.resize(sizes[draw.integers(len(sizes))], Image.Resampling.BICUBIC).save(path)
        row["images"] = [str(path.absolute())]
    return rows


def _letters(messages: list[Row]) -> int:
    return sum(len(message["content"]) for message in messages)


def read(path: Path) -> list[Row]:
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def as_messages(row: Row) -> Row:
    """A pair whose sides are whole conversations."""
    before = row.get("prompt", [])
    before = [{"role": "user", "content": before}] if isinstance(before, str) else before
    sides = {}
    for side in ("chosen", "rejected"):
        answer = row[side]
        answer = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        sides[side] = [*before, *answer]
    return sides


def as_text(row: Row) -> Row:
    """A stepwise row whose prompt and steps are plain text."""

    def text(value: Any) -> str:
        return value if isinstance(value, str) else "\n".join(part["content"] for part in value)

    steps = [text(step) for step in row["completions"]]
    return {"prompt": text(row["prompt"]), "completions": steps, "labels": list(row["labels"])}


def ours(options: argparse.Namespace, workflow: str) -> Row:
    """One `rlhf run`."""
    size = options.size or SIZES[workflow]
    run = options.output / f"run-{workflow}"
    words = [
        "--model.path", str(options.output / "model"),
        "--model.dtype", options.dtype, "--data.train", str(options.output / f"{workflow}.jsonl"),
        "--data.max_tokens", str(options.max_tokens), "--data.too_long", "cut",
        "--batch.size", str(size), "--batch.tokens", str(options.tokens),
        "--train.steps", str(options.steps), "--checkpoint.every", "null", "--optim.lr", "1e-6",
        "--deepspeed.stage", options.stage, "--nproc", options.nproc,
        "--output", str(run), "--overwrite",
    ]  # fmt: skip
    if workflow == "kd":
        words += ["--kd.teacher", str(options.output / "teacher")]
    if options.lora:
        words += ["--lora.rank", str(options.lora)]
    if options.quantize:
        words += ["--model.quantize", options.quantize]
    words += options.more
    log = options.output / f"run-{workflow}.log"
    command = [sys.executable, *options.program, "run", workflow, *words]
    caches = caches_of(options, "rlhf", workflow)
    ended = launched(command, log, run, steps=options.steps, caches=caches)
    return {"who": "rlhf", "workflow": workflow} | measured(run, log, *ended, size=size)


def measured(run: Path, log: Path, code: int, first: float | None, *, size: int) -> Row:
    """What the files of a run say of its speed and memory, with `size` rows a step."""
    lines = [json.loads(line) for line in metrics_of(run)]
    steps = [line for line in lines if "tokens_per_s" in line]
    timed = steps[WARM_UP:] or steps
    each = [
        (after["num_tokens"] - before["num_tokens"]) / after["tokens_per_s"]
        for before, after in itertools.pairwise(steps)
    ]
    seconds = each[WARM_UP - 1 :] or each
    result: Row = {"code": code, "rows_a_step": size, "first_step_s": first}
    if code or not steps:
        result["error"] = end_of(log)
    else:
        result["startup"] = json.loads((run / "summary.json").read_text())["startup"]
    if not seconds:
        return result
    tokens = statistics.median(line["tokens_per_s"] for line in timed)
    # Steps hold as many rows and not as many tokens: the rate is that of the mean row.
    row = steps[-1]["num_tokens"] / (size * len(steps))
    result |= {
        "step_ms": 1e3 * statistics.median(seconds),
        "rows_per_s": tokens / row,
        "tokens_per_s": tokens,
        "losses": [line["loss"] for line in steps],
    }
    for name in ("mfu", "peak_memory_gib", "padding"):
        if name in timed[-1]:
            result[name] = statistics.median(line[name] for line in timed)
    return result


def caches_of(options: argparse.Namespace, who: str, workflow: str) -> dict[str, str]:
    """The environment of a run, with caches that only it and its later rounds use if they are to
    begin cold."""
    if not options.cold:
        return dict(os.environ)
    cache = (options.output / f"cache-{who}-{workflow}").absolute()
    names = ("RLHF_CACHE", "TRITON_CACHE_DIR")
    return os.environ | {name: str(cache / name.lower()) for name in names}


def launched(
    command: list[str], log: Path, run: Path, *, steps: int, caches: Mapping[str, str]
) -> tuple[int, float | None]:
    """The exit code, 0 when the last step is there, and seconds until the first was."""
    start, first = time.perf_counter(), None
    (run / "metrics.jsonl").unlink(missing_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=caches)
        while process.poll() is None:
            lines = metrics_of(run)
            if first is None and lines:
                first = time.perf_counter() - start
            if any(f'"step": {steps},' in line for line in lines):
                process.kill()
                process.wait()
                return 0, first
            time.sleep(0.05)
    return process.returncode, first


def metrics_of(run: Path) -> list[str]:
    file = run / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def make_weights(folder: Path, precision: str, *, seed: int) -> None:
    """Random weights beside a config.json, the same for both sides."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        config = AutoConfig.from_pretrained(folder)
        images = hasattr(config, "vision_config")
        kind = AutoModelForImageTextToText if images else AutoModelForCausalLM
        model = kind.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peer(options: argparse.Namespace, workflow: str) -> Row:
    """The same with another system."""
    size = options.size or SIZES[workflow]
    words = [
        workflow, "--rows", str(options.output / f"{workflow}.jsonl"), "--size", str(size),
        "--model", str(options.output / "model"), "--teacher", str(options.output / "teacher"),
        "--dtype", options.dtype, "--accumulate", str(options.accumulate),
        "--max-tokens", str(options.max_tokens), "--steps", str(options.steps),
        "--attention", options.attention, *["--liger"] * options.liger,
        "--started", str(time.time()),
        *(["--packed", options.packed] if options.packed else []),
        *(["--lora", str(options.lora)] if options.lora else []),
        *(["--quantize", options.quantize] if options.quantize else []),
        *(["--zero", options.stage] if options.nproc != "1" else []),
    ]  # fmt: skip
    script = [str(Path(__file__).with_name(PEERS[options.system]))]
    if options.nproc != "1":
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", options.nproc]
        script = [*ranks, *script]
    log = options.output / f"peer-{workflow}.log"
    with log.open("w") as errors:
        done = subprocess.run(
            [options.peer, *script, *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=caches_of(options, "peer", workflow),
        )
    # Its own logs are Python's dictionaries, in single quotes.
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    found = json.loads(lines[-1]) if lines else {}
    if done.returncode or not lines:
        found["error"] = end_of(log)
    return {
        "who": options.system,
        "workflow": workflow,
        "code": done.returncode or int(not lines),
        "rows_a_step": size,
    } | found


def end_of(log: Path) -> str:
    """Where it is and its last line, progress bars left out."""
    lines = log.read_text().splitlines()
    bars = ("it/s]", "s/it]")
    messages = [line for line in lines if line.strip() and not line.endswith(bars)]
    return ": ".join([str(log), *messages[-1:]])


def as_table(results: Sequence[Row]) -> str:
    """A line for each side of each workflow, medians over the rounds, and the ratio."""
    head = "| workflow | rows a step | | ms a step | rows/s | tokens/s | MFU | peak GiB |"
    head += " padding | seconds to the first step |"
    rows = [head, "|" + "---|" * head.count(" |")]
    for workflow in dict.fromkeys(result["workflow"] for result in results):
        sides = {}
        for who in ("rlhf", *PEERS):
            runs = [r for r in results if (r["who"], r["workflow"]) == (who, workflow)]
            if not runs:
                continue
            sides[who] = {name: median_of(runs, name) for name in NUMBERS}
            cells = [shown(sides[who][name], form) for name, form in NUMBERS.items()]
            cells.append(", ".join(shown(run.get("first_step_s"), ".1f") for run in runs))
            rows.append(f"| {workflow} | {runs[0]['rows_a_step']} | {who} | {' | '.join(cells)} |")
        speed, memory = (_ratio(sides, name) for name in ("rows_per_s", "peak_memory_gib"))
        if speed:
            rows.append(f"| | | ratio | | {speed} | | | {memory or '-'} | | |")
    return "\n".join(rows) + "\n"


NUMBERS = {
    "step_ms": ".1f", "rows_per_s": ",.1f", "tokens_per_s": ",.0f", "mfu": ".3f",
    "peak_memory_gib": ".1f", "padding": ".1%",
}  # fmt: skip


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def median_of(runs: Sequence[Row], name: str) -> float | None:
    values = [run[name] for run in runs if run.get(name) is not None]
    return statistics.median(values) if values else None


def _ratio(sides: Mapping[str, Mapping[str, float | None]], name: str) -> str | None:
    """The first side's value over the second's, if both sides were measured."""
    values = [value for side in sides.values() if (value := side[name]) is not None]
    return f"{values[0] / values[1]:.2f}x" if len(values) == 2 else None


if __name__ == "__main__":
    sys.exit(main())
