"""TRL's GRPOTrainer on the recorded answers that `grpo.py` has written, or with `--write` on those
that it writes to the prompts of a file with `generate` of transformers: one JSON line.

It needs TRL 1.16, and nothing of this project, in the Python that runs it.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pyarrow as pa
import torch
import transformers
from datasets import Dataset
from grpo_reward import remainder
from peer_trl import DTYPES, WARM_UP, StepEnds
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


class Recorded:
    """The answers of the files, as `rollout_func` returns them. A prompt is its number."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.arrow"), key=lambda path: int(path.stem))
        tables = [pa.ipc.open_file(pa.memory_map(str(file))).read_all() for file in files]
        self.groups: list[dict[str, Any]] = pa.concat_tables(tables).to_pylist()
        self._taken = [0] * len(self.groups)

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        drawn: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for number in map(int, prompts):
            group, answer = self.groups[number], self._taken[number] % trainer.num_generations
            self._taken[number] += 1
            drawn["prompt_ids"].append(group["prompt"])
            drawn["completion_ids"].append(group["tokens"][answer])
            drawn["logprobs"].append(group["logprobs"][answer])
        return drawn


def main() -> None:
    options = parse()
    clock, recorded = StepEnds(), None
    if options.write is None:
        recorded = Recorded(options.rollouts)
        prompts = [{"prompt": str(number)} for number in range(len(recorded.groups))]
    else:
        prompts = [json.loads(line) for line in options.write.read_text().splitlines()]
    on_gpu = torch.cuda.is_available()
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=options.steps, learning_rate=1e-6,
        per_device_train_batch_size=options.micro, num_generations=options.answers,
        gradient_accumulation_steps=options.prompts * options.answers // options.micro,
        max_completion_length=options.max_new_tokens, loss_type="dapo", beta=0.0, temperature=1.0,
        logging_steps=1, save_strategy="no", report_to="none", seed=0, optim="adamw_torch_fused",
        bf16=options.dtype == "bf16", use_cpu=not on_gpu, gradient_checkpointing=False,
        use_liger_kernel=options.liger,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        options.model, attn_implementation=options.attention, dtype=DTYPES[options.dtype]
    )
    trainer = GRPOTrainer(
        model=model.to("cuda" if on_gpu else "cpu"), args=args, reward_funcs=remainder,
        processing_class=AutoTokenizer.from_pretrained(options.model), callbacks=[clock],
        train_dataset=Dataset.from_list(prompts), rollout_func=recorded,
    )  # fmt: skip
    trainer.train()
    pairs = zip(clock.times[:-1], clock.times[1:], strict=True)
    each = [after - before for before, after in pairs]
    found = {
        "step_ms": 1e3 * statistics.median(each[WARM_UP - 1 :] or each),
        "first_step_s": clock.times[0] - options.started,
        "losses": clock.losses,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "transformers": transformers.__version__,
    }
    print(json.dumps(found), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--rollouts", "--model"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--prompts", "--answers", "--micro", "--max-new-tokens", "--steps"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--write", type=Path, help="rows of prompts")
    parser.add_argument("--started", type=float, default=time.time(), help="when the process was")
    return parser.parse_args()


if __name__ == "__main__":
    main()
