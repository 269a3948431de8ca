"""PPO on prompts with images: the critic reads them too, on any number of ranks."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from image_families import IMAGE_FAMILIES
from transformers import AutoModelForImageTextToText
from vision_models import picture, qwen3_5

from rlhf_devkit import column
from rlhf_devkit.ranks import Ranks
from rlhf_devkit.tiny import run_without_room, write_rows

STAGE_3 = ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0")
TOKENS = {
    "image_token_id": 262, "video_token_id": 263, "vision_start_token_id": 260,
    "vision_end_token_id": 261,
}  # fmt: skip
REWARD = (
    "def length(completions, **columns):\n    return [float(len(str(c))) for c in completions]\n"
)


def model_folder(folder: Path) -> Path:
    """Write a small Qwen 3.5 with a processor, of which transformers has a token classifier."""
    family = IMAGE_FAMILIES["Qwen3.5"]
    options = json.loads(json.dumps(dict(family.options))) | TOKENS
    options["text_config"] |= {"vocab_size": 272, "eos_token_id": 256, "pad_token_id": 257}
    options["vision_config"] |= {"patch_size": 4, "spatial_merge_size": 2}
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**options)
    AutoModelForImageTextToText.from_config(config).save_pretrained(qwen3_5(folder))
    return folder


@pytest.mark.matrix
def test_policy_and_critic_learn_from_prompts_with_images(
    tmp_path: Path, one: Ranks, two: Ranks
) -> None:
    picture(16, 16).save(tmp_path / "a.png")
    (tmp_path / "rewards.py").write_text(REWARD)
    prompts = [[{"role": "user", "content": text}] for text in ("<image>Who?", "Hi")]
    rows = [{"prompt": prompts[0], "images": ["a.png"]}, {"prompt": prompts[1]}] * 4
    words = [
        "--model", str(model_folder(tmp_path / "model")), "--model.dtype", "fp32",
        "--data.train", str(write_rows(tmp_path / "rows.jsonl", rows)), "--data.workers", "0",
        "--data.max_tokens", "128", "--batch.size", "2", "--batch.tokens", "400",
        "--optim.lr", "1e-3", "--train.steps", "3",
        "--ppo.rewards", f"[{tmp_path / 'rewards.py'}:length]", "--ppo.answers", "2",
        "--ppo.batches", "1", "--ppo.max_new_tokens", "5",
    ]  # fmt: skip
    alone, apart = (
        ranks.run(
            run_without_room, "ppo", [*words, *more, "--output", str(tmp_path / str(ranks.world))],
            str(tmp_path / "cache"),
        )[0]
        for ranks, more in ((one, ()), (two, STAGE_3))
    )  # fmt: skip
    for name in ("loss", "reward", "grad_norm", "critic/grad_norm"):
        assert column(apart, name) == pytest.approx(column(alone, name), rel=1e-3)
    assert min(column(alone, "grad_norm")[0], *column(alone, "critic/grad_norm")) > 0
