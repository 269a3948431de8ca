"""Speed and memory of GRPO's trainer alone on recorded answers, through `rlhf run grpo` itself, TRL
beside it in turns.

    python benchmarks/grpo.py
    python benchmarks/grpo.py --shape 1.5b --dtype bf16 --peer python --liger --micro G1=8 G2=4 G3=8

The first takes a tiny shape on the CPU. This script writes the answers as files of a run, which
`--rollouts.replay` trains on; TRL gets the same prompts, answers and log-probabilities from the
same files through `rollout_func`. Both compute the same reward, and neither writes answers. Weights
are random in a shape of Qwen2.5, so nothing is downloaded. The workloads are 16 prompts with 8
answers each a step: G1 has prompts of 512 tokens and answers of 64 to 512, G2 2,048 and 256, G3 64
and 1,024; `--divide 16` makes all of them so many times shorter. With several numbers in `--tokens`
(of our micro-batches) or `--micro` (answers of TRL's, of all workloads or of one) each is run. With
`--write` both sides write the answers themselves, ours with the engine `embedded` and TRL with
`generate` of transformers: random weights end none, so each is as long as the longest.
Medians of the steps after the fourth. Words after `--` go to every `rlhf run`. One table, also in
`OUTPUT/grpo.md` and `grpo.json`.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen
from model_folder import SHAPES, VOCABULARY, make
from transformers import AutoTokenizer
from workflows import TINY, Row, end_of, launched, make_weights, measured, shown

import rlhf_demo
from rlhf.data.layout import steps as steps_of_epoch
from rlhf.rollouts import ROLLOUTS
from rlhf.train.rollout import DRAWN, seeds_of
from rlhf.trainer import answer_seeds
from rlhf_rollouts.files import LENGTH, STOP, write_rows

REWARD = f"{Path(__file__).with_name('grpo_reward.py')}:remainder"
PROMPTS, ANSWERS = 16, 8
"""Of a step."""


@frozen
class Load:
    """Tokens of prompts, and of the shortest and the longest answer."""

    prompt: int
    shortest: int
    longest: int

    def divided(self, by: int) -> "Load":
        return Load(*(max(1, size // by) for size in (self.prompt, self.shortest, self.longest)))


LOADS = {"G1": Load(512, 64, 512), "G2": Load(2048, 256, 256), "G3": Load(64, 1024, 1024)}


def main() -> int:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    texts = options.output / "texts.jsonl"
    rows = rlhf_demo.rows("arithmetic", "train", "demonstration")
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    vocabulary = options.vocabulary or (TINY if options.shape == "tiny" else VOCABULARY)
    make(options.output / "model", shape=options.shape, rows=texts, vocabulary=vocabulary)
    make_weights(options.output / "model", options.dtype, seed=0)
    results: list[Row] = []
    for name in options.loads or LOADS:
        load = LOADS[name].divided(options.divide)
        record(options, name, load)
        for tokens in options.tokens:
            results.append(ours(options, name, load, tokens))
        for micro in micros(options, name) if options.peer else ():
            results.append(peer(options, name, load, micro))
        (options.output / "grpo.json").write_text(json.dumps(results, indent=1))
        table = as_table(results)
        (options.output / "grpo.md").write_text(table)
    print(table)
    failed = [result for result in results if result["code"]]
    for result in failed:
        print("{who} {load} ended with {code}: {error}".format(**result), file=sys.stderr)
    return int(bool(failed))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("loads", nargs="*", help=f"of {' '.join(LOADS)}; default all")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--vocabulary", type=int, help="of the head; default that of the shape")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--stage", default="0", help="ZeRO stage")
    parser.add_argument("--nproc", default="1")
    parser.add_argument("--divide", type=int, default=1, help="all lengths")
    parser.add_argument("--tokens", nargs="+", default=["auto"], help="of our micro-batches")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--peer", help="a Python with TRL")
    parser.add_argument("--micro", nargs="+", default=["16"], help="of the peer")
    parser.add_argument("--attention", default="sdpa", help="the peer's attention")
    parser.add_argument("--liger", action="store_true", help="the peer runs with Liger's kernels")
    parser.add_argument("--write", action="store_true", help="both sides write the answers")
    parser.add_argument("--output", type=Path, default=Path("build/grpo"))
    own = sys.argv[1:]
    cut = own.index("--") if "--" in own else len(own)
    options = parser.parse_args(own[:cut])
    options.more = own[cut + 1 :]
    if unknown := set(options.loads) - set(LOADS):
        parser.error(f"no such workload: {', '.join(sorted(unknown))}")
    return options


def record(options: argparse.Namespace, name: str, load: Load) -> None:
    """Write prompts, and random answers to them as the rollouts of a run."""
    draw = random.Random(name)
    tokenizer = AutoTokenizer.from_pretrained(options.output / "model")
    ids = range(len(tokenizer.all_special_ids), len(tokenizer))
    # A word that begins with a space is a token of its own wherever it is.
    words = [text for text in map(tokenizer.decode, ids) if text[:1] == " " and text[1:].isalpha()]
    words = [word for word in words if len(tokenizer.encode(word)) == 1]
    count = PROMPTS * options.steps
    prompts = ["".join(draw.choices(words, k=load.prompt)) for _ in range(count)]
    train = options.output / f"{name}.jsonl"
    train.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    known = -11.9  # About that of a token under random weights; no side depends on it.
    for step, rows in enumerate(steps_of_epoch(count, PROMPTS, 0, 0), start=1):
        table = []
        for row, seed in zip(rows.tolist(), seeds_of(rows, 0, DRAWN, 0), strict=True):
            sizes = [draw.randint(load.shortest, load.longest) for _ in range(ANSWERS)]
            answers = [draw.choices(ids, k=size) for size in sizes]
            table.append(
                {
                    "step": step, "row": f"{train} line {row + 1}", "columns": "{}",
                    "prompt": tokenizer.encode(prompts[row]),
                    "seeds": answer_seeds([seed], ANSWERS), "tokens": answers,
                    "logprobs": [[known] * size for size in sizes],
                    "finish": [LENGTH if size == load.longest else STOP for size in sizes],
                    "text": tokenizer.batch_decode(answers), "extra": "{}",
                    "reward": [0.0] * ANSWERS, "version": step, "images": "",
                }
            )  # fmt: skip
        write_rows(table, recorded_in(options, name) / ROLLOUTS / f"{step}.arrow")


def recorded_in(options: argparse.Namespace, name: str) -> Path:
    """The folder of the run whose rollouts a workload trains on."""
    folder: Path = options.output / f"recorded-{name}"
    return folder


def ours(options: argparse.Namespace, name: str, load: Load, tokens: str) -> Row:
    """One `rlhf run grpo`."""
    run = options.output / f"run-{name}"
    words = [
        "--model.path", str(options.output / "model"), "--model.dtype", options.dtype,
        "--data.train", str(options.output / f"{name}.jsonl"),
        "--data.max_tokens", str(load.prompt + load.longest),
        "--batch.size", str(PROMPTS), "--batch.tokens", tokens,
        "--train.steps", str(options.steps), "--checkpoint.every", "null", "--optim.lr", "1e-6",
        "--grpo.answers", str(ANSWERS), "--grpo.max_new_tokens", str(load.longest),
        "--grpo.rewards", REWARD, "--grpo.truncated", "count", "--grpo.agreement", "100",
        *(() if options.write else ("--rollouts.replay", str(recorded_in(options, name)))),
        "--deepspeed.stage", options.stage, "--nproc", options.nproc,
        "--output", str(run), "--overwrite", *options.more,
    ]  # fmt: skip
    log = options.output / f"run-{name}-{tokens}.log"
    command = [sys.executable, "-m", "rlhf", "run", "grpo", *words]
    ended = launched(command, log, run, steps=options.steps, caches=dict(os.environ))
    result = measured(run, log, *ended, size=PROMPTS)
    return {"who": "rlhf", "load": name, "micro": f"{tokens} tokens", **result}


def peer(options: argparse.Namespace, name: str, load: Load, micro: int) -> Row:
    """The same with TRL."""
    words = [
        "--rollouts", str(recorded_in(options, name) / ROLLOUTS),
        "--model", str(options.output / "model"), "--dtype", options.dtype,
        "--prompts", str(PROMPTS), "--answers", str(ANSWERS), "--micro", str(micro),
        "--max-new-tokens", str(load.longest), "--steps", str(options.steps),
        "--attention", options.attention, *["--liger"] * options.liger,
        *(("--write", str(options.output / f"{name}.jsonl")) if options.write else ()),
        "--started", str(time.time()),
    ]  # fmt: skip
    log = options.output / f"peer-{name}-{micro}.log"
    command = [options.peer, str(Path(__file__).with_name("peer_grpo.py")), *words]
    with log.open("w") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    found = json.loads(lines[-1]) if lines else {"error": end_of(log)}
    code = done.returncode or int(not lines)
    return {"who": "TRL", "load": name, "micro": f"{micro} answers", "code": code} | found


def micros(options: argparse.Namespace, name: str) -> list[int]:
    """The micro-batches of the peer in a workload."""
    pairs = [word.rpartition("=") for word in options.micro]
    return [int(size) for load, _, size in pairs if load in ("", name)]


def as_table(results: Sequence[Row]) -> str:
    """A line for each run, and the ratio of the fastest of both sides."""
    head = "| workload | | micro-batch | ms a step | answers/s | MFU | peak GiB | first step, s |"
    rows = [head, "|" + "---|" * head.count(" |")]
    for load in dict.fromkeys(result["load"] for result in results):
        best: dict[str, Row] = {}
        for result in (result for result in results if result["load"] == load):
            rate = answers_per_s(result)
            cells = [
                shown(result.get("step_ms"), ",.0f"), shown(rate, ",.1f"),
                shown(result.get("mfu"), ".3f"), shown(result.get("peak_memory_gib"), ".1f"),
                shown(result.get("first_step_s"), ".1f"),
            ]  # fmt: skip
            first = f"| {load} | {result['who']} | {result['micro']} | "
            rows.append(first + " | ".join(cells) + " |")
            if rate and rate > (answers_per_s(best.get(result["who"], {})) or 0):
                best[result["who"]] = result
        if len(best) == 2:
            rates = [answers_per_s(best[who]) or 0 for who in ("rlhf", "TRL")]
            peaks = [best[who].get("peak_memory_gib") or 0.0 for who in ("rlhf", "TRL")]
            memory = f"{peaks[0] / peaks[1]:.2f}x" if all(peaks) else "-"
            rows.append(f"| | ratio | | | {rates[0] / rates[1]:.2f}x | | {memory} | |")
    return "\n".join(rows) + "\n"


def answers_per_s(result: Mapping[str, Any]) -> float | None:
    """Return the answers that a run trains on in a second."""
    ms = result.get("step_ms")
    return None if ms is None else 1e3 * PROMPTS * ANSWERS / ms


if __name__ == "__main__":
    sys.exit(main())
