"""Whether two versions of this project compute the same, to the last bit.

    python benchmarks/bits.py record before.json --program "old/.venv/bin/rlhf"
    python benchmarks/bits.py record after.json
    python benchmarks/bits.py compare before.json after.json

`record` runs the demo of every trainer and short runs under many settings (ranks, ZeRO stages,
offload, recomputation, resume) through the command line only, so it can record any version. It
keeps every metric of every step and a digest of every exported weight. `compare` prints one line
per run and exits with 1 if any bit differs. Metrics of time and memory are left out. Both versions
must run on the same machine with the same torch.
"""

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

MEASURED = ("*tokens_per_s", "*mfu", "*_seconds", "*/seconds", "*memory*")
"""Metrics that two runs of the same version do not share."""

ROWS = "path: 'demo:arithmetic'"
SHORT = f"""
model: {{path: 'demo:base', dtype: fp32}}
data:
  train: {{{ROWS}, split: train, limit: 22}}
  eval: {{{ROWS}, split: eval, limit: 7}}
  workers: 0
batch: {{size: 4, tokens: 512}}
optim: {{lr: 1.0e-2, clip: 0.5, warmup: 0}}
train: {{steps: 7}}
checkpoint: {{every: null}}
"""
"""22 rows in steps of 4: seven steps reach into a second epoch, and clipping acts."""

REWARDS = """
def distinct(completion_ids, **columns):
    return [float(len(set(ids))) for ids in completion_ids]
"""
TRAINERS = ("sft", "dpo", "rm", "kd", "kto", "prm", "grpo")
STAGE_3 = "--deepspeed.stage 3 --deepspeed.persistence_threshold 0"
OFFLOAD = "--deepspeed.offload_optimizer true"
BF16 = "--model.dtype bf16 --optim.states bf16 --optim.lr 1e-3"
KD = "--kd.teacher demo:base --model.init random"
GRPO = (
    "--grpo.rewards rewards.py:distinct --grpo.answers 3 --grpo.max_new_tokens 8 "
    "--grpo.batches 2 --grpo.passes 2"
)
SETTINGS = {
    "one rank": "sft --deepspeed.stage 0",
    "one rank, small micro-batches": "sft --deepspeed.stage 0 --batch.tokens 128",
    "one rank, recompute selective": "sft --deepspeed.stage 0 --model.recompute selective",
    "one rank, recompute full": "sft --deepspeed.stage 0 --model.recompute full",
    "one rank, states in bf16": f"sft --deepspeed.stage 0 {BF16}",
    "one rank, LoRA with dropout": "sft --deepspeed.stage 0 --lora.rank 4 --lora.dropout 0.3",
    "one rank, dpo, LoRA": "dpo --deepspeed.stage 0 --lora.rank 4",
    "one rank, on-policy": f"kd --deepspeed.stage 0 {KD} --kd.on_policy 1 --kd.max_new_tokens 16",
    "one rank, grpo": f"grpo --deepspeed.stage 0 {GRPO}",
    "stage 0": "sft --nproc 2 --deepspeed.stage 0",
    "stage 1": "sft --nproc 2 --deepspeed.stage 1",
    "stage 2": "sft --nproc 2 --deepspeed.stage 2 --batch.tokens 128",
    "stage 2, recompute full": "sft --nproc 2 --deepspeed.stage 2 --model.recompute full",
    "stage 2, states in bf16": f"sft --nproc 2 --deepspeed.stage 2 {BF16}",
    "stage 3": f"sft --nproc 2 {STAGE_3}",
    "stage 3, recompute selective": f"sft --nproc 2 {STAGE_3} --model.recompute selective",
    "stage 3, recompute full": f"sft --nproc 2 {STAGE_3} --model.recompute full",
    "stage 3, states in bf16": f"sft --nproc 2 {STAGE_3} {BF16}",
    "stage 1, optimizer on the CPU": f"sft --nproc 2 --deepspeed.stage 1 {OFFLOAD}",
    "stage 2, optimizer on the CPU": f"sft --nproc 2 --deepspeed.stage 2 {OFFLOAD}",
    "stage 3, optimizer on the CPU": f"sft --nproc 2 {STAGE_3} {OFFLOAD}",
    "stage 3, all on the CPU": f"sft --nproc 2 {STAGE_3} {OFFLOAD} --deepspeed.offload_param true",
    "stage 3, dpo": f"dpo --nproc 2 {STAGE_3}",
    "stage 3, rm": f"rm --nproc 2 {STAGE_3}",
    "stage 3, kd": f"kd --nproc 2 {STAGE_3} {KD}",
    "stage 3, kto": f"kto --nproc 2 {STAGE_3}",
    "stage 3, prm": f"prm --nproc 2 {STAGE_3}",
    "stage 3, grpo": f"grpo --nproc 2 {STAGE_3} {GRPO}",
}
RESUMED = {"stage 2, resumed": "stage 2", "stage 3, resumed": "stage 3"}
"""Runs that stop after three steps and resume."""
CASES = (*(f"demo {trainer}" for trainer in TRAINERS), *SETTINGS, *RESUMED)

Record = dict[str, Any]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the cases and write what they computed")
    recording.add_argument("output", type=Path)
    recording.add_argument("--program", default=f"{sys.executable} -m rlhf", help="the command")
    recording.add_argument("--steps", type=int, default=12, help="optimizer steps of a demo")
    recording.add_argument("--only", default="*", help="shell pattern of cases")
    comparing = commands.add_parser("compare", help="exit with 1 if any bit differs")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args(words)
    if options.command == "compare":
        return compare(
            json.loads(options.before.read_text()), json.loads(options.after.read_text())
        )
    records = {}
    for case in CASES:
        if fnmatch(case, options.only):
            print(case, flush=True)
            records[case] = record(shlex.split(options.program), case, options.steps)
            options.output.write_text(json.dumps(records, indent=1))
    return 0


def record(program: list[str], case: str, steps: int) -> Record:
    """Run a case in a folder and with a cache of its own; return its metrics and weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        environment = os.environ | {"RLHF_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        for words in commands_of(case, steps):
            command = [*program, "run", *words, "--output", "run"]
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True
            )
            if done.returncode:
                raise SystemExit(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
        return {"metrics": metrics(folder / "run"), "weights": weights(folder / "run" / "model")}


def write_inputs(folder: Path) -> None:
    """Write the configuration of the short runs, and the reward of those that need one."""
    (folder / "short.yaml").write_text(SHORT)
    (folder / "rewards.py").write_text(REWARDS)


def commands_of(case: str, steps: int) -> list[list[str]]:
    """Words after `rlhf run`, one list per process that the case starts."""
    if case.startswith("demo "):
        return [[case.split()[1], "--train.stop_at", str(steps), "--train.log_every", "1"]]
    trainer, *settings = shlex.split(SETTINGS[RESUMED.get(case, case)])
    words = [trainer, "short.yaml", *settings]
    if case in RESUMED:
        return [[*words, "--train.stop_at", "3"], [*words, "--resume"]]
    return [words]


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what a clock or an allocator says."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not any(fnmatch(name, p) for p in MEASURED)}
        for line in lines
    ]


def weights(model: Path) -> dict[str, str]:
    """SHA-256 of every tensor's dtype, shape and bytes in the safetensors files of a folder."""
    digests = {}
    for file in sorted(model.rglob("*.safetensors")):
        content = file.read_bytes()
        # The format: 8 bytes with the length of the header, the header in JSON, then the tensors.
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = (start + offset for offset in entry["data_offsets"])
                form = f"{entry['dtype']} {entry['shape']} ".encode()
                key = f"{file.relative_to(model)}:{name}"
                digests[key] = hashlib.sha256(form + content[begin:end]).hexdigest()
    return digests


def compare(before: dict[str, Record], after: dict[str, Record]) -> int:
    """Print a table of the cases; return 1 if any of them differs, else 0."""
    print("| case | lines of metrics | tensors | |\n|---|---|---|---|")
    equal = True
    for case in sorted({**before, **after}):
        if case in before and case in after:
            difference = first_difference(before[case], after[case])
            lines, tensors = len(after[case]["metrics"]), len(after[case]["weights"])
        else:
            difference, lines, tensors = f"only {'before' if case in before else 'after'}", 0, 0
        equal = equal and not difference
        print(f"| {case} | {lines} | {tensors} | {difference or 'the same'} |")
    return int(not equal)


def first_difference(before: Record, after: Record) -> str:
    """Name the first metric or weight that differs; an empty text if none does."""
    lines = (len(before["metrics"]), len(after["metrics"]))
    if lines[0] != lines[1]:
        return f"{lines[0]} lines of metrics, then {lines[1]}"
    for old, new in zip(before["metrics"], after["metrics"], strict=True):
        for name in {**old, **new}:
            # repr is exact for floats, and equal for two that are not a number.
            if repr(old.get(name)) != repr(new.get(name)):
                return f"step {new.get('step')} {name}: {old.get(name)}, then {new.get(name)}"
    for name in {**before["weights"], **after["weights"]}:
        if before["weights"].get(name) != after["weights"].get(name):
            return f"weight {name}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
