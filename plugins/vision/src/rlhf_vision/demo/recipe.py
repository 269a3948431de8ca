"""Make the base model of `demo:shapes` from random weights: `python -m rlhf_vision.demo.recipe
FOLDER`, a few minutes on one core.

The vision tower first learns to name what each cell of an image shows. Then the whole model learns
to answer questions, for so short a time that it knows shapes and colors and guesses the rest.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PaddleOCRVLProcessor,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlhf_vision.demo import answered, asked, shapes

IMAGE_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
SPECIAL = (
    "<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>",
    *IMAGE_TOKENS.values(),
)  # fmt: skip
TEMPLATE = (
    "{% macro text(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endmacro %}"
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ text(message.content) }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ text(message.content) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIGHT_STEPS, STEPS = 200, 150
BATCH, RATE, WARMUP = 32, 2e-3, 50
PATCH = shapes.CELL // 2
"""Pixels of a side of a patch. The model merges 2 x 2 of them, so that a cell is one token."""
INITIAL = 0.1
"""Standard deviation of initial weights. With the usual 0.02, a model as narrow as this one needs
many more steps until it attends to the image."""


def make(folder: Path) -> None:
    """Train the base model and write it with its processor into `folder`."""
    torch.manual_seed(0)
    processor = make_processor()
    model = make_model(processor.tokenizer)
    for lesson in (sight(model, processor, SIGHT_STEPS), answers(model, processor, STEPS)):
        for step, loss in enumerate(lesson, 1):
            if step % 50 == 0:
                print(f"step {step:5d} loss {loss:.3f}", flush=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def sight(model: Any, processor: Any, steps: int) -> Iterator[float]:
    """Train the vision tower so that the features of each cell point to the embeddings of the words
    for what it shows, and yield the loss of each step."""
    draw, names = random.Random("sight"), [*shapes.SHAPES, *"0123456789"]

    def loss() -> torch.Tensor:
        wanted = [
            [(draw.choice(names), draw.choice([*shapes.COLORS])) for _ in range(3)]
            for _ in range(BATCH)
        ]
        scenes = [shapes.scene(draw, things) for things in wanted]
        batch = processor.image_processor(
            [shapes.image(each) for each in scenes], return_tensors="pt"
        )
        seen = model.model.visual(batch["pixel_values"], grid_thw=batch["image_grid_thw"])
        words = torch.cat([_words(each, processor.tokenizer) for each in scenes])
        embeddings = model.get_input_embeddings().weight
        layers = [seen.pooler_output, *seen.deepstack_features]
        losses = [F.cross_entropy(features @ embeddings.T, words) for features in layers]
        return torch.stack(losses).mean()

    yield from _train(
        [*model.model.visual.parameters(), *model.get_input_embeddings().parameters()], loss, steps
    )


def answers(model: Any, processor: Any, steps: int) -> Iterator[float]:
    """Train the whole model on questions, and yield the loss of each step."""
    draw, kinds = random.Random("answers"), [*shapes.KINDS]

    def loss() -> torch.Tensor:
        rows = [shapes.question(draw.choice(kinds), draw) for _ in range(BATCH)]
        return model(**encode(processor, rows)).loss

    yield from _train([*model.parameters()], loss, steps)


def _train(
    weights: Sequence[torch.nn.Parameter], loss: Callable[[], torch.Tensor], steps: int
) -> Iterator[float]:
    optimizer = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / WARMUP)
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield value.item()


def _words(scene: shapes.Scene, tokenizer: Any) -> torch.Tensor:
    """Return the share of each token in what the cells of a scene show, [cells, tokens]: half the
    color and half the name; the token of images for an empty cell."""
    shown = torch.zeros(scene.rows * scene.columns, len(tokenizer))
    shown[:, tokenizer.image_token_id] = 1.0
    for thing in scene.things:
        cell = thing.row * scene.columns + thing.column
        name = thing.name if thing.name.isdigit() else f" {thing.name}"
        shown[cell] = 0.0
        for word in (f" {thing.color}", name):
            (token,) = tokenizer.encode(word)
            shown[cell, token] = 0.5
    return shown


def encode(processor: Any, questions: Sequence[shapes.Question]) -> Any:
    """Return what the model's forward takes, with labels on the answers."""
    texts = [
        processor.apply_chat_template([asked(each), answered(each.answer)]) for each in questions
    ]
    images = [[shapes.image(scene) for scene in each.scenes] for each in questions]
    batch = processor(text=texts, images=images, padding=True, return_tensors="pt")
    tokens = batch["input_ids"]
    starts = (tokens == processor.tokenizer.convert_tokens_to_ids("<|assistant|>")).int().argmax(1)
    written = torch.arange(tokens.shape[1]) > starts[:, None]
    batch["labels"] = tokens.where(written & batch["attention_mask"].bool(), -100)
    return batch


def make_processor() -> Any:
    """Return the processor: Qwen's images and this project's tokenizer.

    The class is that of a family that reads images in the same way and no videos: transformers
    opens Qwen's own only if torchvision is installed, which its videos need.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_train_tokenizer(), bos_token="<|begin|>", eos_token="<|end|>",
        pad_token="<|pad|>", model_max_length=512, extra_special_tokens=IMAGE_TOKENS,
        padding_side="right",
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    images = Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=2, temporal_patch_size=2,
        size={"shortest_edge": 56 * 56, "longest_edge": 224 * 224},
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip
    return PaddleOCRVLProcessor(images, tokenizer, chat_template=TEMPLATE)


def make_model(tokenizer: Any) -> Any:
    """Return a Qwen3-VL of 0.6 M parameters with random weights."""
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 4, 4],
                "mrope_interleaved": True,
            },
            "initializer_range": INITIAL,
            "tie_word_embeddings": True,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 48,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 96,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            "initializer_range": INITIAL,
        },
        tie_word_embeddings=True,
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
        vision_start_token_id=tokenizer.vision_start_token_id,
        vision_end_token_id=tokenizer.vision_end_token_id,
    )
    return Qwen3VLForConditionalGeneration(config)


def _train_tokenizer() -> Tokenizer:
    """Byte-level BPE with every digit a piece of its own, so that any text can be read."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    text = (f"{each.text}\n{each.answer}" for each in shapes.questions("train"))
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


if __name__ == "__main__":
    make(Path(sys.argv[1]))
