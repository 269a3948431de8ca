"""A reward model that reads images: its scores are those of plain transformers, and `rlhf serve`
takes images as data URLs."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from image_families import IMAGE_FAMILIES
from served import TOKEN, serving
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from vision_models import FAMILIES, picture

from rlhf.formats import BadImage
from rlhf.plugin import ModelConfig
from rlhf_plugin_rm.scorer import Scorer
from rlhf_vision.processor import load_processor

Parts = list[dict[str, Any]]
NAMES = {"gemma3": "Gemma 3", "qwen3_5": "Qwen3.5"}
TOKENS = {
    "gemma3": {"image_token_index": "<image_soft_token>"},
    "qwen3_5": {
        "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    },
}  # fmt: skip
ANSWERS = ["It is a cat.", "A dog!", "No."]


def reward_model(name: str, folder: Path) -> Path:
    """Write a reward model of a family with random weights, as a run of rm exports it."""
    FAMILIES[name](folder)
    tokenizer, own = AutoTokenizer.from_pretrained(folder), IMAGE_FAMILIES[NAMES[name]]
    options = dict(own.options)
    options["text_config"] |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if name == "gemma3":
        options["vision_config"] = options["vision_config"] | {"image_size": 16}
    tokens = {key: tokenizer.convert_tokens_to_ids(text) for key, text in TOKENS[name].items()}
    config = getattr(transformers, own.config)(**{**options, **tokens}, num_labels=1)
    config.rlhf_trainer = "rm"
    torch.manual_seed(2)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def data_url(number: int) -> str:
    file = io.BytesIO()
    picture(24 + 8 * number, 16, number).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def image(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(number)}}


def asked(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": [{"type": "text", "text": text}]}]


def plain_reward(folder: Path, numbers: tuple[int, ...], answer: str) -> float:
    """Return the reward in plain transformers."""
    processor = load_processor(ModelConfig(path=str(folder)))
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    talk = [*asked(*({"type": "image"} for _ in numbers)), *said(answer)]
    text = processor.apply_chat_template(talk, tokenize=False)
    images = [picture(24 + 8 * number, 16, number) for number in numbers] or None
    text = text.removeprefix(processor.tokenizer.bos_token or "")
    with torch.no_grad():
        return float(model(**processor(text=text, images=images, return_tensors="pt")).logits[0, 0])


@pytest.fixture(
    scope="module", params=["gemma3", pytest.param("qwen3_5", marks=pytest.mark.matrix)]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_model(request.param, tmp_path_factory.mktemp("scored") / request.param)


def test_rewards_of_answers_about_images_are_those_of_plain_transformers(folder: Path) -> None:
    scorer = Scorer(folder)
    questions = [(0,), (1, 2), ()]
    expected = [[plain_reward(folder, each, text) for text in ANSWERS] for each in questions]
    prompts = [asked(*map(image, numbers)) for numbers in questions]
    assert len({round(value, 4) for values in expected for value in values}) == 9
    for _ in range(2):
        found = [scorer.rewards(prompt, [*map(said, ANSWERS)]) for prompt in prompts]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
        path = scorer.pack(longest=64)
    assert path.path == IMAGE_FAMILIES[NAMES[folder.name]].path
    rows = [scorer.encode(prompt, [*map(said, ANSWERS)]) for prompt in prompts]
    together = scorer.logits(rows)
    for ours, theirs in zip(together, expected, strict=True):
        assert [float(each[0, 0]) for each in ours] == pytest.approx(theirs, abs=1e-5)
    # A part of the answers at a time.
    ours = [
        float(each[0, 0]) for each in scorer.read(prompts[1], [*map(said, ANSWERS)], max_tokens=1)
    ]
    assert ours == pytest.approx(expected[1], abs=1e-5)


def test_only_images_that_are_sent_are_opened(folder: Path, tmp_path: Path) -> None:
    scorer = Scorer(folder)
    file = tmp_path / "secret.png"
    picture(16, 16).save(file)
    for part in (
        {"type": "image", "image": str(file)},
        {"type": "image_url", "image_url": {"url": f"file://{file}"}},
        {"type": "image", "image": {"path": str(file)}},
        {"image": str(file)},
    ):
        for prompt in (asked(part), json.dumps(asked(part))):
            with pytest.raises(BadImage, match="neither is read here"):
                scorer.encode(prompt, [said("a")])
    assert scorer.rewards(asked({"type": "image", "image": picture(16, 16)}), [said("a")])


def test_a_server_takes_images_as_data_urls(folder: Path) -> None:
    expected = [plain_reward(folder, (0,), text) for text in ANSWERS]
    with serving(folder, "--token", TOKEN) as server:

        def score(*parts: dict[str, Any]) -> Any:
            item = {"prompt": asked(*parts), "answers": [*map(said, ANSWERS)]}
            return server.post("/v1/score", {"items": [item]})

        assert score(image(0)).body["items"][0]["scores"] == pytest.approx(expected, abs=1e-5)
        body = {"messages": [*asked(image(0)), *said(ANSWERS[1])]}
        found = server.post("/classify", body).body["data"][0]["probs"]
        assert found == pytest.approx([expected[1]], abs=1e-5)

        def refusal(url: str) -> Any:
            return score({"type": "image_url", "image_url": {"url": url}}).refusal

        assert refusal("https://example.org/cat.png") == (
            400,
            "items[0]: image 1 (https://example.org/cat.png) is a URL or a path, and neither is "
            "read here; send the image as the data URL data:image/png;base64,...",
        )
        assert refusal("data:image/png;base64,!") == (
            400,
            "items[0]: image 1 (data:image/png;base64,!) is not valid base64; replace it",
        )
        nothing = base64.b64encode(b"no image").decode()
        assert refusal(f"data:image/png;base64,{nothing}") == (
            400,
            f"items[0]: image 1 (data:image/png;base64,{nothing}) is not an image that Pillow can "
            "read; replace it",
        )
        assert score(image(0)).status == 200

        token = {"gemma3": "<image_soft_token>", "qwen3_5": "<|image_pad|>"}[folder.name]
        for path, text in (
            ("/get_reward", {"query": [f"{token} a"]}),
            ("/classify", {"input": f"{token} a"}),
            ("/v1/score", {"items": [{"prompt": f"{token}", "answers": ["a"]}]}),
        ):
            assert server.post(path, text).refusal == (
                422,
                f"a text has the token of an image ({token}) without an image; send the "
                "conversation as messages, with the image as a part of type image_url",
            )
