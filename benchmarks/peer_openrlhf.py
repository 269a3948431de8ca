"""One of OpenRLHF's trainers on the rows and the shape that `workflows.py` has made: one JSON line.

It needs, in the Python that runs it, OpenRLHF 0.9.3, transformers 4.57.6, tokenizers 0.22,
huggingface-hub 0.36, datasets 4.4, DeepSpeed, and flash-attn or a package of its name. ZeRO 2, bf16
with fp32 masters, rows packed but in distillation. A step is timed from outside, by the calls of
`DeepspeedStrategy.optimizer_step`.
"""

import json
import os
import runpy
import shutil
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from openrlhf.utils.deepspeed.deepspeed import DeepspeedStrategy
from peer_trl import WARM_UP, length, parse
from transformers import AutoTokenizer


class StepEnds:
    """`optimizer_step`, which OpenRLHF calls after each micro-batch, with a clock. After the last
    step it prints the line and ends the process."""

    def __init__(self, options: Any, tokens: float) -> None:
        self.options, self.tokens = options, tokens
        self.step = DeepspeedStrategy.optimizer_step
        self.times: list[float] = []

    def __call__(self, *inputs: Any, **named: Any) -> None:
        self.step(*inputs, **named)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.time())
        if len(self.times) == self.options.steps * self.options.accumulate:
            print(json.dumps(self.found()), flush=True)
            os._exit(0)

    def found(self) -> dict[str, Any]:
        """The numbers of `peer_trl.py`."""
        every, size = self.options.accumulate, self.options.size
        ends = self.times[every - 1 :: every]
        first = {"first_step_s": ends[0] - self.options.started}
        if len(ends) <= WARM_UP:
            return first
        pairs = zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)
        seconds = statistics.median(after - before for before, after in pairs)
        on_gpu = torch.cuda.is_available()
        return first | {
            "step_ms": 1e3 * seconds,
            "rows_a_step": size,
            "rows_per_s": size / seconds,
            "tokens_per_s": size * self.tokens / seconds,
            "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        }


def main() -> None:
    options = parse()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ.update(place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    work = Path(tempfile.mkdtemp())
    model = readable(options.model, work / "model")
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = statistics.mean(length(tokenizer, row, options.max_tokens) for row in rows)
    clock = StepEnds(options, tokens)
    DeepspeedStrategy.optimizer_step = lambda *inputs, **named: clock(*inputs, **named)
    words = [
        "--dataset", str(options.rows), "--max_len", str(options.max_tokens),
        "--pretrain", str(model), "--save_path", str(work / "saved"),
        "--train_batch_size", str(options.size),
        "--micro_train_batch_size", str(options.size // options.accumulate),
        "--max_epochs", str(1 + options.size * options.steps // len(rows)),
        "--zero_stage", "2", "--learning_rate", "1e-6", "--apply_chat_template",
        "--attn_implementation", options.attention,
    ]  # fmt: skip
    if options.workflow in ("sft", "kd"):
        words += ["--input_key", "messages"]
    if options.workflow == "kd":
        teacher = readable(options.teacher, work / "teacher")
        words += ["--teacher_model", str(teacher), "--output_key", ""]
    elif options.attention == "flash_attention_2":
        words += ["--packing_samples"]
    if options.liger and options.workflow != "rm":  # Its trainer has no such setting.
        words += ["--use_liger_kernel"]
    sys.argv = ["openrlhf", *words]
    runpy.run_module(f"openrlhf.cli.train_{options.workflow}", run_name="__main__")


def readable(folder: Path, copy: Path) -> Path:
    """The folder with a tokenizer's class that transformers 4 knows; its weights are links."""
    shutil.copytree(folder, copy, copy_function=os.link)
    file = copy / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.unlink()
    file.write_text(json.dumps(settings))
    return copy


if __name__ == "__main__":
    main()
