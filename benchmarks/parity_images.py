"""Write what TRL's trainers log over three steps on rows with images: tests/parity/images.json.

    python benchmarks/parity_images.py tests/parity/images.json

Needs TRL 1.16 and rlhf-vision in the environment, whose `demo:shapes` has the rows and the model.
Each step is on the first twelve rows, with one or two images, in fp32 on the CPU. TRL trains
the vision tower, too; here it is frozen, as it is by default in rlhf.
"""

import base64
import datetime
import io
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from rlhf_vision.demo import model_folder, rows

ROWS, STEPS, RATE = 12, 3, 1e-3
Row = dict[str, Any]


def main() -> None:
    found = {
        "peer": f"trl {version('trl')}",
        "made": f"by benchmarks/parity_images.py, {datetime.date.today()}",
        "rows": ROWS,
        "rate": RATE,
        "sft": logged(SFTTrainer, SFTConfig, "demonstration"),
        "dpo": logged(DPOTrainer, DPOConfig, "preference"),
    }
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


def logged(trainer: Any, config: Any, format: str) -> list[Row]:
    """Return the loss and the norm of the gradient of each step."""
    data = Dataset.from_list([as_trl(row) for row in rows("train", format)[:ROWS]])
    args = config(
        output_dir=tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=ROWS,
        learning_rate=RATE, lr_scheduler_type="constant", max_length=None, logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=True, bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    processor = AutoProcessor.from_pretrained(str(model_folder()))
    more = {"ref_model": model()} if trainer is DPOTrainer else {}
    run = trainer(model=model(), args=args, train_dataset=data, processing_class=processor, **more)
    for name, parameter in run.model.model.visual.named_parameters():
        parameter.requires_grad_("merger" in name)
    run.train()
    history = [line for line in run.state.log_history if "loss" in line]
    return [{name: line[name] for name in ("loss", "grad_norm")} for line in history]


def model() -> Any:
    return AutoModelForImageTextToText.from_pretrained(str(model_folder()), dtype=torch.float32)


def as_trl(row: Row) -> Row:
    """Return a row with images that are decoded, and an answer in a column of its own."""
    if "messages" in row:
        *prompt, answer = row["messages"]
        row = {"images": row["images"], "prompt": prompt, "completion": [answer]}
    return {
        name: [image(url) for url in value] if name == "images" else [turn(it) for it in value]
        for name, value in row.items()
    }


def image(url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(url.split(",", 1)[1]))).convert("RGB")


def turn(message: Row) -> Row:
    """Return a message whose parts have the same keys, which `datasets` asks for."""
    parts = [{"type": part["type"], "text": part.get("text")} for part in message["content"]]
    return {"role": message["role"], "content": parts}


if __name__ == "__main__":
    main()
