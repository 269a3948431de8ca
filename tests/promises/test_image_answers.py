"""Answers to prompts with images are those of plain transformers."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from image_families import PLACEHOLDER, image_model, path_inputs
from image_families import example_with_images as example_of

from rlhf.engine import Mesh
from rlhf.trainer import Answer, Example, Sample, prompt_inputs, with_answers
from rlhf_devkit.families import llama
from rlhf_rollouts.decoder import Start
from rlhf_rollouts.embedded import Embedded
from rlhf_rollouts.pictured import has_images, with_image

ENDS = [7]
NEW = 6


def writer(budget: int = 512) -> Any:
    hooks: Any = SimpleNamespace(generation_context=lambda engine: nullcontext())
    config: Any = SimpleNamespace(batch=SimpleNamespace(budget=budget))
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=2)
    return Embedded(config=config, tokenizer=tokenizer, mesh=Mesh(), hooks=hooks)


def engine_of(name: str) -> Any:
    module = llama()
    module.model = image_model(name)
    device = torch.device("cpu")
    return SimpleNamespace(module=module, device=device, precision="fp32", sharded=False)


def prompts_of(name: str, causal: Any) -> list[Example]:
    """Return prompts with one image, two and none."""
    draw = np.random.default_rng(3)
    return [
        example_of(name, causal, draw, count, 0, lengths=(length, 1))
        for count, length in ((1, 9), (2, 4), (0, 6), (1, 5))
    ]


def written(
    engine: Any, prompts: list[Example], embedded: Any, temperature: float = 0.0
) -> list[Sample]:
    samples: list[Sample] = embedded.sample(
        engine, [each.prompt for each in prompts], seeds=[40 + n for n in range(len(prompts))],
        max_new_tokens=NEW, max_tokens=200, ends=ENDS, temperature=temperature,
        inputs=[prompt_inputs(each) for each in prompts],
    )  # fmt: skip
    return samples


def plain(causal: Any, example: Example) -> list[int]:
    """Return the most likely answer, by transformers' own call on one prompt."""
    tokens = torch.tensor([list(example.prompt)])
    inputs = path_inputs(example, 0)
    inputs = {} if not len(inputs["pixel_values"]) else inputs
    for kind in ("mm_token_type_ids", "token_type_ids"):
        if kind in example.inputs:
            inputs[kind] = (tokens == PLACEHOLDER).int()
    out = causal.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs, do_sample=False,
        max_new_tokens=NEW, eos_token_id=ENDS, pad_token_id=0, suppress_tokens=[PLACEHOLDER],
    )  # fmt: skip
    return list(out[0, tokens.shape[1] :].tolist())


@pytest.mark.parametrize(
    "name",
    [
        "Qwen2.5-VL", "SmolVLM", "Gemma 3",
        *(pytest.param(each, marks=pytest.mark.matrix) for each in (
            "Qwen3-VL", "Qwen3.5", "LLaVA", "Mistral 3", "InternVL", "LLaVA-OneVision", "LFM2-VL"
        )),
    ],
)  # fmt: skip
def test_the_most_likely_answers_are_those_of_plain_transformers(name: str) -> None:
    engine, embedded = engine_of(name), writer()
    prompts = prompts_of(name, engine.module.causal)
    samples = written(engine, prompts, embedded)
    assert [each.tokens for each in samples] == [
        plain(engine.module.causal, each) for each in prompts
    ]
    kind = type(engine.module.causal).__name__
    assert embedded.notes == [
        f"rollouts   {kind} answers prompts with images by generate of transformers"
    ]
    other = with_answers(prompts[0], [Answer([1])])
    pixels = -np.asarray(other.inputs["pixel_values"])
    other = Example(other.prompt, [], inputs={**other.inputs, "pixel_values": pixels})
    assert written(engine, [other], embedded)[0].logprobs != samples[0].logprobs


def test_an_answer_depends_only_on_its_prompt_and_seed() -> None:
    engine, embedded = engine_of("Qwen2.5-VL"), writer()
    prompts = prompts_of("Qwen2.5-VL", engine.module.causal)
    together = written(engine, prompts, embedded, 1.0)
    in_turn = written(engine, prompts, writer(1), 1.0)
    assert [each.tokens for each in together] == [each.tokens for each in in_turn]
    for one, other in zip(together, in_turn, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_no_answer_has_the_token_of_an_image() -> None:
    engine = engine_of("SmolVLM")
    prompts = prompts_of("SmolVLM", engine.module.causal)
    head = engine.module.causal.lm_head.weight
    with torch.no_grad():
        own = head[PLACEHOLDER].clone()
        head[PLACEHOLDER] *= 100
        samples = written(engine, prompts, writer(), 1.0)
        head[PLACEHOLDER] = own
    assert all(PLACEHOLDER not in each.tokens for each in samples)


def test_a_group_without_images_gets_one_of_another() -> None:
    pixels = [np.zeros((rows, 3)) for rows in (0, 2, 1, 0)]
    starts = [
        Start(prompt=[1] * size, seed=0, room=1, inputs={"pixel_values": own})
        for size, own in zip((2, 5, 4, 3), pixels, strict=True)
    ]
    assert [has_images(one) for one in starts] == [False, True, True, False]
    assert with_image(starts, [0, 3]) == [0, 3, 2]
    assert with_image(starts, [1, 3]) == [1, 3]
    assert with_image(starts[:1], [0]) == [0]
