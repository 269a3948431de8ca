"""Small models that read images, and examples with images of random pixels, as processors make
them."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from attrs import frozen
from transformers import AutoModelForImageTextToText

from rlhf.data.example import Answer, Example
from rlhf.data.packing import SEGMENT_ROWS
from rlhf_devkit.families import FAMILIES, SIZES

PLACEHOLDER = 90
TOKENS = {
    "image_token_id": PLACEHOLDER,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
TOWER = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
GEMMA_4 = {
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4,
        "pooling_kernel_size": 2, "position_embedding_size": 16,
    },
    "audio_config": None, "image_token_id": PLACEHOLDER, "video_token_id": 91, "boi_token_id": 92,
    "eoi_token_id": 93, "audio_token_id": 94, "boa_token_id": 95,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN = {
    "hidden_size": 16, "intermediate_size": 16, "depth": 2, "num_heads": 2, "patch_size": 4,
    "out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
}  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
LLAMA = SIZES | {"head_dim": 8, "model_type": "llama"}

Inputs = dict[str, Any]
Draw = np.random.Generator


def drawn(draw: Draw, *shape: int) -> Any:
    return draw.normal(size=shape).astype(np.float32)


def patches(draw: Draw) -> Inputs:
    """An image of the Qwen families."""
    height, width = 2 * draw.integers(1, 4, 2)
    return {
        "pixel_values": drawn(draw, height * width, 96),
        "image_grid_thw": np.array([[1, height, width]]),
    }


def square(size: int = 8) -> Callable[[Draw], Inputs]:
    return lambda draw: {"pixel_values": drawn(draw, 1, 3, size, size)}


def sized(draw: Draw) -> Inputs:
    height, width = 8 * draw.integers(1, 4, 2)
    return {
        "pixel_values": drawn(draw, 1, 3, height, width),
        "image_sizes": np.array([[height, width]]),
    }


def tile(draw: Draw) -> Inputs:
    """An image of SmolVLM, each in a row of its own."""
    return {
        "pixel_values": drawn(draw, 1, 1, 3, 16, 16),
        "pixel_attention_mask": np.ones((1, 1, 16, 16), bool),
    }


def shaped(draw: Draw) -> Inputs:
    """An image of LFM2-VL."""
    height, width = 2 * draw.integers(1, 3, 2)
    mask = np.zeros((1, 16), np.int64)
    mask[:, : height * width] = 1
    return {
        "pixel_values": drawn(draw, 1, 16, 48) * mask[:, :, None].astype(np.float32),
        "pixel_attention_mask": mask,
        "spatial_shapes": np.array([[height, width]]),
    }


def numbered(draw: Draw) -> Inputs:
    """An image of Gemma 4, whose patches have numbers of a column and a row."""
    height, width = 2 * draw.integers(1, 3, 2)
    places = np.full((1, 16, 2), -1)
    places[0, : height * width] = [[x, y] for y in range(height) for x in range(width)]
    shown = (places >= 0).all(-1)[:, :, None].astype(np.float32)
    return {"pixel_values": drawn(draw, 1, 16, 48) * shown, "image_position_ids": places}


def crops(draw: Draw) -> Inputs:
    """An image of LLaVA-NeXT and OneVision: the whole, and two or four crops."""
    wide = bool(draw.integers(2))
    return {
        "pixel_values": drawn(draw, 1, 3 if wide else 5, 3, 8, 8),
        "image_sizes": np.array([[8, 16] if wide else [16, 12]]),
    }


@frozen
class ImageFamily:
    """A family's config and images, and the name of the input that tells images from text."""

    config: str
    options: Mapping[str, Any]
    image: Callable[[Draw], Inputs]
    types: str = ""
    path: str = "tree"


IMAGE_FAMILIES = {
    "Qwen2.5-VL": ImageFamily(
        "Qwen2_5_VLConfig",
        {
            "text_config": SIZES | {"rope_parameters": ROPE},
            "vision_config": QWEN | {"fullatt_block_indexes": [1], "window_size": 16},
        }
        | TOKENS,
        patches,
        "mm_token_type_ids",
    ),
    "Qwen3-VL": ImageFamily(
        "Qwen3VLConfig",
        {"text_config": SIZES | {"head_dim": 8, "rope_parameters": ROPE}, "vision_config": QWEN}
        | TOKENS,
        patches,
        "mm_token_type_ids",
    ),
    "Qwen3.5": ImageFamily(
        "Qwen3_5Config",
        {
            "text_config": SIZES
            | {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
            | {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
            | {"layer_types": ["linear_attention", "full_attention"]},
            "vision_config": QWEN,
        }
        | TOKENS,
        patches,
        "mm_token_type_ids",
    ),
    "Qwen3-VL-MoE": ImageFamily(
        "Qwen3VLMoeConfig",
        {
            "text_config": SIZES | EXPERTS | {"head_dim": 8, "rope_parameters": ROPE},
            "vision_config": QWEN,
        }
        | TOKENS,
        patches,
        "mm_token_type_ids",
    ),
    "Qwen3.5-MoE": ImageFamily(
        "Qwen3_5MoeConfig",
        {
            "text_config": SIZES
            | EXPERTS
            | {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
            | {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
            | {"layer_types": ["linear_attention", "full_attention"]}
            | {"shared_expert_intermediate_size": 16},
            "vision_config": QWEN,
        }
        | TOKENS,
        patches,
        "mm_token_type_ids",
    ),
    "GLM-4V": ImageFamily(
        "Glm4vConfig",
        {
            "text_config": SIZES | {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "depth": 2,
                "num_heads": 2,
                "patch_size": 4,
                "out_hidden_size": 32,
                "image_size": 32,
            },
            "image_start_token_id": 94,
            "image_end_token_id": 95,
            "video_start_token_id": 92,
            "video_end_token_id": 93,
        }
        | {name: TOKENS[name] for name in ("image_token_id", "video_token_id")},
        patches,
        "mm_token_type_ids",
    ),
    "Gemma 4 E2B": ImageFamily(
        "Gemma4Config",
        {"text_config": FAMILIES["Gemma 4"][1]} | GEMMA_4,
        numbered,
        "mm_token_type_ids",
    ),
    "Gemma 4": ImageFamily(
        "Gemma4Config",
        {"text_config": FAMILIES["Gemma 4"][1] | {"use_bidirectional_attention": "vision"}}
        | GEMMA_4,
        numbered,
        "mm_token_type_ids",
        "padded",
    ),
    "LLaVA-NeXT": ImageFamily(
        "LlavaNextConfig",
        {
            "text_config": LLAMA,
            "vision_config": TOWER | {"model_type": "clip_vision_model"},
            "image_token_index": PLACEHOLDER,
            "image_grid_pinpoints": [[8, 16], [16, 16]],
        },
        crops,
    ),
    "LLaVA": ImageFamily(
        "LlavaConfig",
        {
            "text_config": LLAMA,
            "vision_config": TOWER | {"model_type": "clip_vision_model"},
            "image_token_index": PLACEHOLDER,
        },
        square(),
    ),
    "Gemma 3": ImageFamily(
        "Gemma3Config",
        {"text_config": FAMILIES["Gemma 3"][1], "vision_config": TOWER}
        | {"mm_tokens_per_image": 4, "image_token_index": PLACEHOLDER},
        square(),
        "token_type_ids",
        "padded",
    ),
    "Mistral 3": ImageFamily(
        "Mistral3Config",
        {
            "text_config": LLAMA | {"model_type": "mistral"},
            "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 8, "image_size": 32},
            "image_token_index": PLACEHOLDER,
        },
        sized,
    ),
    "Pixtral": ImageFamily(
        "LlavaConfig",
        {
            "text_config": LLAMA | {"model_type": "mistral"},
            "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 8, "image_size": 32},
            "image_token_index": PLACEHOLDER,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        sized,
    ),
    "InternVL": ImageFamily(
        "InternVLConfig",
        {
            "text_config": LLAMA | {"model_type": "qwen2"},
            "vision_config": TOWER | {"image_size": [16, 16], "patch_size": [4, 4]},
            "image_token_id": PLACEHOLDER,
        },
        square(16),
    ),
    "SmolVLM": ImageFamily(
        "SmolVLMConfig",
        {
            "text_config": LLAMA | {"pad_token_id": 0},
            "vision_config": TOWER | {"image_size": 16, "model_type": "smolvlm_vision"},
            "image_token_id": PLACEHOLDER,
            "scale_factor": 2,
        },
        tile,
    ),
    "LFM2-VL": ImageFamily(
        "Lfm2VlConfig",
        {
            "text_config": FAMILIES["LFM2"][1] | {"model_type": "lfm2"},
            "vision_config": TOWER | {"model_type": "siglip2_vision_model", "num_patches": 16},
            "image_token_id": PLACEHOLDER,
            "downsample_factor": 2,
            "projector_hidden_size": 16,
        },
        shaped,
    ),
    "LLaVA-OneVision": ImageFamily(
        "LlavaOnevisionConfig",
        {
            "text_config": LLAMA | {"model_type": "qwen2"},
            "vision_config": TOWER
            | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "image_token_index": PLACEHOLDER,
            "image_grid_pinpoints": [[8, 16], [16, 16]],
        },
        crops,
    ),
}


def from_config(config: Any) -> Any:
    """Return a model whose config names its class, as those of checkpoints do."""
    causal = AutoModelForImageTextToText.from_config(config)
    causal.config.architectures = [type(causal).__name__]
    return causal


@cache
def image_model(name: str) -> Any:
    """Return a model of a family in IMAGE_FAMILIES with random weights."""
    own = IMAGE_FAMILIES[name]
    torch.manual_seed(1)
    causal = from_config(getattr(transformers, own.config)(**own.options))
    with torch.no_grad():
        for parameter in causal.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return causal.eval()


def example_with_images(
    name: str, causal: Any, draw: Draw, *images: int, lengths: Sequence[int]
) -> Example:
    """Return a prompt and answers with so many tokens of text and so many images each."""
    own, names = IMAGE_FAMILIES[name], sorted(IMAGE_FAMILIES[name].image(draw))
    nothing = {key: value[:0] for key, value in own.image(draw).items()}
    segments, found, rows = [], [nothing], []
    for count, length in zip(images, lengths, strict=True):
        tokens, before = draw.integers(1, PLACEHOLDER, length).tolist(), len(found)
        for _ in range(count):
            one = own.image(draw)
            found.append(one)
            tokens[1:1] = [5, *[PLACEHOLDER] * num_features(causal, one), 6]
        segments.append(tokens)
        rows.append([sum(len(one[key]) for one in found[before:]) for key in names])
    inputs = {key: joined([one[key] for one in found]) for key in names}
    example = Example(segments[0], [Answer(tokens) for tokens in segments[1:]])
    flat = np.concatenate(segments)
    more: Inputs = {own.types: np.where(flat == PLACEHOLDER, 1, 0)} if own.types else {}
    if hasattr(causal.base_model, "get_rope_index"):
        more["position_ids"] = positions(causal, segments, inputs, np.array(rows))
    return Example(
        example.prompt, example.answers, {}, {**inputs, **more, SEGMENT_ROWS: np.array(rows)}
    )


def joined(parts: Sequence[Any]) -> Any:
    """Return arrays filled up with zeros to one shape, along the first dimension."""
    shape = np.max([part.shape for part in parts], axis=0).astype(int)
    filled = []
    for part in parts:
        missing = shape - part.shape
        filled.append(np.pad(part, [(0, 0), *((0, int(more)) for more in missing[1:])]))
    return np.concatenate(filled)


def num_features(causal: Any, image: Inputs) -> int:
    inputs = {name: torch.as_tensor(value) for name, value in image.items()}
    with torch.no_grad():
        found = causal.base_model.get_image_features(**inputs, return_dict=True).pooler_output
    return sum(len(part.flatten(0, -2)) for part in found)


def path_inputs(example: Example, answer: int) -> Inputs:
    """Return the inputs of the images on the path of an answer, in order."""
    rows = np.asarray(example.inputs[SEGMENT_ROWS])
    names = sorted(set(example.inputs) - {SEGMENT_ROWS, "position_ids", "mm_token_type_ids"})
    names = [name for name in names if name != "token_type_ids"]
    out = {}
    for column, name in enumerate(names):
        ends = np.cumsum([0, *rows[:, column]])
        parts = [example.inputs[name][ends[n] : ends[n + 1]] for n in (0, answer + 1)]
        out[name] = torch.as_tensor(np.concatenate(parts))
    return out


def positions(causal: Any, segments: list[list[int]], inputs: Inputs, rows: Any) -> Any:
    """Return the positions of the tokens along their paths, by the model's own code."""
    bare = Example(
        segments[0], [Answer(own) for own in segments[1:]], {}, {**inputs, SEGMENT_ROWS: rows}
    )
    out = []
    for number, answer in enumerate(segments[1:]):
        path = torch.tensor([[*segments[0], *answer]])
        grid = path_inputs(bare, number)["image_grid_thw"]
        found, _ = causal.base_model.get_rope_index(
            path, (path == PLACEHOLDER).int(), image_grid_thw=grid
        )
        own = found[:, 0].T.numpy()
        out += [own[: len(segments[0])]] if not number else []
        out.append(own[len(segments[0]) :])
    return np.concatenate(out)
