"""A real vLLM serves what was trained, with the log-probabilities of plain transformers: models of
text, an adapter, the merged model, and a model that reads images. RLHF_VLLM names its environment
(docs/serve.md)."""

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from image_families import IMAGE_FAMILIES
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText
from vision_models import picture, qwen2_5_vl

from rlhf.commands.main import main
from rlhf.model.exported import exported_model
from rlhf.plugin import ModelConfig
from rlhf_devkit import tiny
from rlhf_vision.processor import load_processor
from small_families import write_family

ENVIRONMENT = os.environ.get("RLHF_VLLM")
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
"""vLLM computes heads of this size on CPUs."""
FAMILIES = {"Qwen3": HEADS, "Granite 4": HEADS | {"mamba_d_head": 32}}
ROPE = {"rope_type": "default", "mrope_section": [8, 4, 4], "rope_theta": 1e4}
TOKENS = {
    "image_token_id": 262, "video_token_id": 263, "vision_start_token_id": 260,
    "vision_end_token_id": 261,
}  # fmt: skip
ASKED = "<|im_start|>user\n{}What is it?<|im_end|>\n<|im_start|>assistant\n"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SCRIPT = str(Path(__file__).parents[1] / "vllm_answers.py")
TEXTS = ("Tom has 3 apples and buys 14 more. How many apples does he have?", "12 + 30 =")


@pytest.mark.matrix
@pytest.mark.skipif(ENVIRONMENT is None, reason="RLHF_VLLM names no environment with vLLM")
def test_vllm_has_the_logprobs_of_plain_transformers(tmp_path: Path) -> None:
    texts = [{"text": text, "images": []} for text in TEXTS]
    words, models = tiny.short_run(tmp_path, "demonstration"), {}
    for name, sizes in FAMILIES.items():
        base = write_family(name, tmp_path / "model", tmp_path / name, **sizes)
        models[name] = {"model": trained(tmp_path, words, base), "prompts": texts}
    base = tmp_path / "Qwen3"
    adapter = trained(tmp_path, words, base, "--lora", "4", "--optim.lr", "3e-2")
    assert main(["merge", adapter, str(tmp_path / "merged")]) == 0
    models["adapter"] = {"model": str(base), "adapter": adapter, "prompts": texts}
    models["merged"] = {"model": str(tmp_path / "merged"), "prompts": texts}
    base, pictured = image_model(tmp_path / "Qwen2.5-VL"), image_rows(tmp_path)
    words += ["--data.train", str(pictured), "--data.eval", str(pictured), "--batch.tokens", "2048"]
    files = [str(tmp_path / f"{number}.png") for number in range(2)]
    models["images"] = {
        "model": trained(tmp_path, words, base, "--model.train", "[language, projector]"),
        "prompts": [
            {"text": ASKED.format(IMAGE * count), "images": files[:count]} for count in range(3)
        ],
    }
    for name, served in answered(tmp_path / "models.json", models).items():
        folder = served.get("adapter", served["model"])
        for prompt, found in zip(served["prompts"], served["found"], strict=True):
            expected = plain_logprobs(folder, found["tokens"], prompt)[-len(found["logprobs"]) :]
            worst = (expected - torch.tensor(found["logprobs"])).abs().max()
            assert worst < 1e-4, (name, prompt, float(worst))


def trained(folder: Path, words: list[str], base: Path, *more: str) -> str:
    """Train a model for four steps and return the folder of the exported one."""
    output = folder / f"run-{len([*folder.glob('run-*')])}"
    own = ["--model", str(base), "--output", str(output), *more]
    tiny.run("sft", [*words, *own], str(folder / "cache"), True)
    return str(output / "model")


def image_model(folder: Path) -> Path:
    """Write a small Qwen2.5-VL with a processor whose file, as published ones, says how pixels are
    normalised: vLLM does that by itself."""
    family = IMAGE_FAMILIES["Qwen2.5-VL"]
    options = copy.deepcopy(dict(family.options)) | TOKENS
    special = {"vocab_size": 264, "eos_token_id": 256, "pad_token_id": 257}
    options["text_config"] |= HEADS | special | {"rope_parameters": ROPE}
    options["vision_config"] |= {"hidden_size": 64, "out_hidden_size": 64}
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**options)
    AutoModelForImageTextToText.from_config(config).save_pretrained(qwen2_5_vl(folder))
    file = folder / "preprocessor_config.json"
    pixels = {"do_rescale": True, "do_normalize": True}
    pixels |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    file.write_text(json.dumps(json.loads(file.read_text()) | pixels))
    return folder


def image_rows(folder: Path) -> Path:
    """Write rows with pictures that no processor has to resize."""
    rows = []
    for number in range(8):
        picture(24 + 8 * (number % 3), 16 + 8 * (number % 2), number).save(folder / f"{number}.png")
        said = [("user", "<image>What is it?"), ("assistant", ("A cat.", "A red dog.")[number % 2])]
        messages = [{"role": role, "content": text} for role, text in said]
        rows.append({"images": [f"{number}.png"], "messages": messages})
    return tiny.write_rows(folder / "pictured.jsonl", rows)


def answered(file: Path, models: dict[str, Any]) -> dict[str, Any]:
    """Return `models` with what vLLM has found, in a process of its environment."""
    file.write_text(json.dumps(models))
    # GiB of memory, of which it takes most by default; and sockets, which it leaves behind.
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "TMPDIR": str(file.parent)}
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": ""}
    command = [f"{ENVIRONMENT}/bin/python", SCRIPT, str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def plain_logprobs(folder: str, tokens: list[int], prompt: dict[str, Any]) -> Tensor:
    """Return the log-probabilities of all tokens but the first in plain transformers."""
    whole = torch.tensor([tokens])
    inputs = {"input_ids": whole}
    if prompt["images"]:
        processor = load_processor(ModelConfig(path=folder))
        images = [Image.open(image) for image in prompt["images"]]
        inputs = dict(processor(text=[prompt["text"]], images=images, return_tensors="pt"))
        length = inputs["input_ids"].shape[1]
        assert inputs.pop("input_ids").tolist() == whole[:, :length].tolist()
        inputs["attention_mask"] = torch.ones_like(whole)
        kinds = inputs["mm_token_type_ids"]
        inputs["mm_token_type_ids"] = torch.cat([kinds, torch.zeros_like(whole[:, length:])], 1)
        inputs["input_ids"] = whole
    model = exported_model(folder, "causal", dtype="fp32").eval()
    with torch.no_grad():
        logprobs = model(**inputs).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, whole[0, 1:, None])[:, 0]
