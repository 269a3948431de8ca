"""Tiny checkpoints of models that read images, without weights: a tokenizer of bytes, the processor
of the family with small settings, and a chat template like the published one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for c in m.content %}{% if c.type == 'image' or 'image' in c %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in c %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' '}}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}{{ '<start_of_image>' }}{% elif c.type == 'text' %}"
    "{{ c.text | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
INTERN = QWEN.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\n")
ONEVISION = QWEN.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")
SMOL = (
    "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}"
    "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
GEMMA_4 = (
    "{{ bos_token }}{% for m in messages %}<|turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}{{ '\n\n<|image|>\n\n' }}{% elif c.type == 'text' %}"
    "{{ c.text | trim }}{% endif %}{% endfor %}{% endif %}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}"
    "<|begin_of_image|><|image|><|end_of_image|>{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}[IMG]{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
    "[/INST]{% else %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}</s>{% endif %}{% endfor %}"
)
OF_LLAVA = {
    "patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default",
}  # fmt: skip
PATCHES = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2]}


def qwen2_5_vl(folder: Path) -> Path:
    vision = {"patch_size": 4, "spatial_merge_size": 2}
    return _qwen(folder, "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", vision)


def qwen3_vl(folder: Path) -> Path:
    vision = {"patch_size": 4, "spatial_merge_size": 2}
    return _qwen(folder, "qwen3_vl", "Qwen3VLForConditionalGeneration", vision)


def qwen3_5(folder: Path) -> Path:
    vision = {"patch_size": 4, "spatial_merge_size": 2}
    return _qwen(folder, "qwen3_5", "Qwen3_5ForConditionalGeneration", vision)


def llava(folder: Path) -> Path:
    """LLaVA 1.5: its tokenizer adds BOS, which its template does not write."""
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16},
    }  # fmt: skip
    return _write(
        folder,
        "llava",
        "LlavaForConditionalGeneration",
        ["<image>"],
        LLAVA,
        processor,
        OF_LLAVA,
        bos=True,
    )


def gemma3(folder: Path) -> Path:
    processor = {
        "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16},
        "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 2,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }  # fmt: skip
    special = ["<start_of_turn>", "<end_of_turn>"]
    named = {
        "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }  # fmt: skip
    return _write(
        folder, "gemma3", "Gemma3ForConditionalGeneration", special, GEMMA, processor,
        {"image_seq_length": 4}, named, bos=True,
    )  # fmt: skip


def internvl(folder: Path) -> Path:
    processor = {
        "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 16, "width": 16},
        "crop_to_patches": True, "max_patches": 4,
    }  # fmt: skip
    named = {
        "start_image_token": "<img>", "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>",
    }  # fmt: skip
    special = ["<|im_start|>", "<|im_end|>"]
    return _write(
        folder, "internvl", "InternVLForConditionalGeneration", special, INTERN, processor,
        {"image_seq_length": 4}, named,
    )  # fmt: skip


def llava_onevision(folder: Path) -> Path:
    processor = {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": {"height": 16, "width": 16}, "image_grid_pinpoints": [[16, 16], [16, 32], [32, 32]],
    }  # fmt: skip
    own = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    special = ["<|im_start|>", "<|im_end|>", "<image>", "<video>"]
    return _write(
        folder, "llava_onevision", "LlavaOnevisionForConditionalGeneration", special, ONEVISION,
        processor, own,
    )  # fmt: skip


def llava_next(folder: Path) -> Path:
    processor = {
        "image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 16},
        "crop_size": {"height": 16, "width": 16},
        "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
    }  # fmt: skip
    return _write(
        folder, "llava_next", "LlavaNextForConditionalGeneration", ["<image>"], LLAVA, processor,
        OF_LLAVA, bos=True,
    )  # fmt: skip


def gemma4(folder: Path) -> Path:
    processor = {
        "image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
    }  # fmt: skip
    named = {
        "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>",
        "boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>",
    }  # fmt: skip
    return _write(
        folder, "gemma4", "Gemma4ForConditionalGeneration", ["<|turn>", "<turn|>"], GEMMA_4,
        processor, {}, named, bos=True,
    )  # fmt: skip


def glm4v(folder: Path) -> Path:
    special = ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|begin_of_image|>", "<|image|>"]
    special += ["<|end_of_image|>", "<|begin_of_video|>", "<|video|>", "<|end_of_video|>"]
    processor = {"image_processor_type": "Glm4vImageProcessor", **PATCHES}
    vision = {"patch_size": 4, "spatial_merge_size": 2}
    return _write(
        folder, "glm4v", "Glm4vForConditionalGeneration", special, GLM, processor, {},
        config={"vision_config": vision, "image_start_token_id": 262, "image_end_token_id": 264},
    )  # fmt: skip


def smolvlm(folder: Path) -> Path:
    processor = {
        "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16}, "do_image_splitting": True,
    }  # fmt: skip
    rows = [f"<row_{row}_col_{col}>" for row in range(1, 4) for col in range(1, 4)]
    special = ["<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>"]
    return _write(
        folder, "smolvlm", "SmolVLMForConditionalGeneration", [*special, "<global-img>", *rows],
        SMOL, processor, {"image_seq_len": 4},
    )  # fmt: skip


def mistral3(folder: Path) -> Path:
    """Mistral 3, with the processor of Pixtral, which needs torchvision."""
    processor = {
        "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 32},
        "patch_size": {"height": 4, "width": 4},
    }  # fmt: skip
    own = {"processor_class": "PixtralProcessor", "patch_size": 4, "spatial_merge_size": 2}
    special = ["[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    return _write(
        folder, "mistral3", "Mistral3ForConditionalGeneration", special, MISTRAL, processor, own,
        bos=True,
    )  # fmt: skip


def lfm2_vl(folder: Path) -> Path:
    """LFM2-VL, whose processor needs torchvision."""
    processor = {
        "image_processor_type": "Lfm2VlImageProcessor", "tile_size": 16, "max_tiles": 4,
        "min_tiles": 2, "encoder_patch_size": 4, "downsample_factor": 2, "min_image_tokens": 2,
        "max_image_tokens": 8, "max_num_patches": 64,
    }  # fmt: skip
    rows = [f"<|img_row_{row}_col_{col}|>" for row in range(1, 5) for col in range(1, 5)]
    special = ["<|im_start|>", "<|im_end|>", "<image>", "<|image_start|>", "<|image_end|>"]
    return _write(
        folder, "lfm2_vl", "Lfm2VlForConditionalGeneration",
        [*special, "<|img_thumbnail|>", *rows], ONEVISION, processor, {},
    )  # fmt: skip


FAMILIES: dict[str, Callable[[Path], Path]] = {
    each.__name__: each
    for each in (
        qwen2_5_vl, qwen3_vl, qwen3_5, llava, gemma3, internvl, llava_onevision, smolvlm,
        llava_next, gemma4, glm4v, mistral3, lfm2_vl,
    )
}  # fmt: skip


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of noise."""
    draw = np.random.default_rng(seed)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8))


def _qwen(folder: Path, kind: str, architecture: str, vision: dict[str, Any]) -> Path:
    special = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    special += ["<|image_pad|>", "<|video_pad|>"]
    processor = {"image_processor_type": "Qwen2VLImageProcessor", **PATCHES}
    around = {"vision_start_token_id": 260, "vision_end_token_id": 261}
    return _write(
        folder, kind, architecture, special, QWEN, processor, {},
        config={"vision_config": vision, **around},
    )  # fmt: skip


def _write(
    folder: Path,
    kind: str,
    architecture: str,
    special: list[str],
    template: str,
    image_processor: dict[str, Any],
    processor: dict[str, Any],
    named: dict[str, str] | None = None,
    *,
    config: dict[str, Any] | None = None,
    bos: bool = False,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    ends = {"eos_token": "</s>", "pad_token": "<pad>", **({"bos_token": "<s>"} if bos else {})}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, **ends, extra_special_tokens=named or {}, chat_template=template,
    )  # fmt: skip
    tokenizer.add_tokens(special, special_tokens=True)
    if bos:
        from tokenizers.processors import TemplateProcessing

        number = tokenizer.convert_tokens_to_ids("<s>")
        backend = tokenizer.backend_tokenizer
        backend.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", number)]
        )
    tokenizer.save_pretrained(folder)
    _json(folder / "preprocessor_config.json", image_processor)
    _json(folder / "processor_config.json", processor)
    _json(
        folder / "config.json",
        {"model_type": kind, "architectures": [architecture], **(config or {})},
    )
    return folder


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
