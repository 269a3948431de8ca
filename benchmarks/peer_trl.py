"""One of TRL's trainers on the rows and the shape that `workflows.py` has made: one JSON line.

It needs TRL, and nothing of this project, in the Python that runs it: TRL 1.16 for all workflows
but prm, which is in TRL up to 1.10. Reference and teacher run in the step. With `--zero STAGE`, on
each of the ranks that torchrun has started, transformers' integration of DeepSpeed divides the
models; at stage 3 they are divided as they are read. Rows with images are not cut, all tokens of
their answers are trained on, and the vision tower is frozen.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset, Image, List
from transformers import AutoProcessor, AutoTokenizer, TrainerCallback

WARM_UP = 4
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class StepEnds(TrainerCallback):
    """When each optimizer step ended, with the device drained, and what it logged."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.losses: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.time())

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


class Collated:
    """A trainer's collator, and how much of what it made is padding."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator
        self.batches = self.tokens = self.real = 0

    def __call__(self, rows: Any) -> Any:
        batch = self.collator(rows)
        self.batches += 1
        masks = [batch[name] for name in batch if name.endswith("attention_mask")]
        # Without a mask the rows are packed one after another.
        masks = masks or [torch.ones_like(batch["input_ids"])]
        self.tokens += sum(mask.numel() for mask in masks)
        self.real += sum(int(mask.sum()) for mask in masks)
        return batch


def main() -> None:
    options = parse()
    if options.zero is not None:
        import deepspeed

        # On the CPU transformers would leave it to the first engine, after the models are read.
        deepspeed.init_distributed()
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    repeats = -(-options.size * options.steps // len(rows))
    clock = StepEnds()
    # How many tokens an image is, only its processor knows.
    options.images = "images" in rows[0]
    tokens = 0.0
    if not options.images:
        tokens = statistics.mean(length(tokenizer, row, options.max_tokens) for row in rows)
    size = options.size
    if options.packed and options.workflow == "sft":
        options.size, options.max_tokens = (int(part) for part in options.packed.split("x"))
        repeats = (
            -(-int(options.size * options.max_tokens / tokens) * options.steps // len(rows)) + 1
        )
    data = Dataset.from_list([*map(prompted, rows)] * repeats if options.images else rows * repeats)
    reader = tokenizer
    if options.images:
        data = data.cast_column("images", List(Image()))
        reader = AutoProcessor.from_pretrained(options.model)
    trainer = make_trainer(options, data, reader, clock)
    if options.images:
        for name, parameter in trainer.model.named_parameters():
            if ".visual." in name and "merger" not in name:
                parameter.requires_grad_(False)
    trainer.data_collator = collated = Collated(trainer.data_collator)
    trainer.train()
    first_step = clock.times[0] - options.started
    if options.steps <= WARM_UP:
        print(json.dumps({"first_step_s": first_step}), flush=True)
        return
    pairs = zip(clock.times[WARM_UP - 1 :], clock.times[WARM_UP:], strict=False)
    seconds = statistics.median(after - before for before, after in pairs)
    if options.packed and options.workflow == "sft":
        # A packed row is not full where the next conversation would not have fitted.
        size = collated.real / collated.batches * options.accumulate * RANKS / tokens
    found = {
        "step_ms": 1e3 * seconds,
        "rows_a_step": round(size),
        "rows_per_s": size / seconds,
        "tokens_per_s": size * tokens / seconds if tokens else None,
        "first_step_s": first_step,
        "losses": clock.losses,
        "padding": 1 - collated.real / collated.tokens,
        "peak_memory_gib": peak(),
        "transformers": transformers.__version__,
    }
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found), flush=True)


def peak() -> float | None:
    """Return the most memory, in GiB, that tensors took on a rank, None on the CPU."""
    if not torch.cuda.is_available():
        return None
    most = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device="cuda")
    if RANKS > 1:
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return float(most)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workflow", choices=("sft", "dpo", "rm", "kd", "kto", "prm"))
    for name in ("--rows", "--model", "--teacher"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--size", "--accumulate", "--max-tokens", "--steps"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--packed", default="")
    parser.add_argument("--lora", type=int, help="rank of an adapter of all linear layers")
    parser.add_argument("--quantize", choices=["nf4"], help="the adapter's base, in 4 bits")
    parser.add_argument("--zero", type=int, help="ZeRO stage, under DeepSpeed")
    parser.add_argument("--started", type=float, default=time.time(), help="when the process was")
    return parser.parse_args()


def make_trainer(options: argparse.Namespace, rows: Dataset, tokenizer: Any, clock: Any) -> Any:
    """The workflow's trainer with its defaults but for what both sides share."""
    settings: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "max_steps": options.steps,
        "per_device_train_batch_size": options.size // options.accumulate // RANKS,
        "gradient_accumulation_steps": options.accumulate, "learning_rate": 1e-6,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "seed": 0,
        "bf16": options.dtype == "bf16", "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False, "optim": "adamw_torch_fused",
        "max_length": None if options.images else options.max_tokens,
        "use_liger_kernel": options.liger,
        "deepspeed": None if options.zero is None else zero(options.zero),
    }  # fmt: skip
    common: dict[str, Any] = {
        "train_dataset": rows, "processing_class": tokenizer, "callbacks": [clock],
    }  # fmt: skip
    workflow = options.workflow
    if options.lora:
        from peft import LoraConfig

        common["peft_config"] = LoraConfig(
            r=options.lora, lora_alpha=2 * options.lora, lora_dropout=0.0,
            target_modules="all-linear", task_type="CAUSAL_LM",
        )  # fmt: skip
    # The configuration comes before any model, since ZeRO 3 divides weights as they are read.
    if workflow == "sft":
        from trl import SFTConfig, SFTTrainer

        only = not options.images  # TRL refuses it with a processor.
        args = SFTConfig(**settings, assistant_only_loss=only, packing=bool(options.packed))
        return SFTTrainer(model=built(options, options.model), args=args, **common)
    if workflow == "dpo":
        from trl import DPOConfig, DPOTrainer

        args, policy = DPOConfig(**settings), built(options, options.model)
        # An adapter's reference is the model without it.
        reference = None if options.lora else built(options, options.model)
        return DPOTrainer(model=policy, ref_model=reference, args=args, **common)
    if workflow == "kto":
        from trl import KTOConfig, KTOTrainer

        args, policy = KTOConfig(**settings), built(options, options.model)
        reference = built(options, options.model)
        return KTOTrainer(model=policy, ref_model=reference, args=args, **common)
    if workflow == "rm":
        from trl import RewardConfig, RewardTrainer

        args = RewardConfig(**settings)
        model = built(options, options.model, "AutoModelForSequenceClassification", num_labels=1)
        return RewardTrainer(model=model, args=args, **common)
    if workflow == "prm":
        from trl.experimental.prm import PRMConfig, PRMTrainer

        args = PRMConfig(**settings)
        model = built(options, options.model, "AutoModelForTokenClassification", num_labels=2)
        return PRMTrainer(model=model, args=args, **common)
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    # Off-policy forward KL, as ours by default.
    args = GKDConfig(**settings, lmbda=0.0, beta=0.0, temperature=1.0)
    policy, teacher = built(options, options.model), built(options, options.teacher)
    return GKDTrainer(model=policy, teacher_model=teacher, args=args, **common)


def zero(stage: int) -> dict[str, Any]:
    """Return a configuration of DeepSpeed in which transformers fills in what is `auto`."""
    return {
        "zero_optimization": {
            "stage": stage, "overlap_comm": True, "contiguous_gradients": True,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
        "bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    }  # fmt: skip


def built(
    options: argparse.Namespace, folder: Path, kind: str = "AutoModelForCausalLM", **changes: Any
) -> Any:
    """The folder's weights."""
    torch.manual_seed(0)
    if options.quantize:
        # The settings of rlhf's `model.quantize nf4`, those of QLoRA (arXiv 2305.14314).
        changes["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=DTYPES[options.dtype],
        )  # fmt: skip
    if options.images:
        kind = "AutoModelForImageTextToText"
    model = getattr(transformers, kind).from_pretrained(
        folder, attn_implementation=options.attention, dtype=DTYPES[options.dtype], **changes
    )
    if options.zero is not None:
        return model  # DeepSpeed places it.
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def prompted(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the answer in a column of its own, as TRL has it for images."""
    if "messages" in row:
        *prompt, answer = row["messages"]
        return {"images": row["images"], "prompt": prompt, "completion": [answer]}
    if "chosen" in row:
        *prompt, chosen = row["chosen"]
        rejected = row["rejected"][-1]
        return {
            "images": row["images"], "prompt": prompt, "chosen": [chosen], "rejected": [rejected],
        }  # fmt: skip
    return row


def length(tokenizer: Any, row: dict[str, Any], most: int) -> int:
    """Tokens of a row without padding, prompts counted as often as they are computed."""

    def of(messages: list[dict[str, str]]) -> int:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        return min(most, len(tokenizer(text, add_special_tokens=False).input_ids))

    if "chosen" in row:
        return of(row["chosen"]) + of(row["rejected"])
    if "messages" in row:
        return of(row["messages"])
    if "label" in row:
        return of(row["prompt"] + row["completion"])
    text = "\n".join([row["prompt"], *row["completions"]])
    return min(most, len(tokenizer(text).input_ids))


if __name__ == "__main__":
    main()
