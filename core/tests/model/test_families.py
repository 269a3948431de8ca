"""Every family of docs/models.md: the probe's choice, hidden states, log-probabilities and
gradients."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from engines import BareEngine
from families import NAMES, OWN_ATTENTION, TREES, family, random_model
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.engine import Mesh
from rlhf.model.head import read_head
from rlhf.model.packed import PackedModel
from rlhf.model.probe import choose_path
from rlhf.model.shape import shape_of
from rlhf.readouts import token_logprobs
from rlhf_devkit.families import FAMILIES, VOCABULARY, gradients, tree_batch

ROUNDING = {
    "Gemma 4": 1e-4, "Kimi Linear": 3e-5, "Qwen3.5": 7e-5, "Qwen3-Next": 7e-5, "OLMo Hybrid": 7e-5,
}  # fmt: skip
"""Largest error of a gradient. Gemma 4 has 7e-7 in float64. The scans of the others compute in
float32 whatever the dtype; from AVX-512 to SSE, the gradients of transformers' own Gated DeltaNet
change by up to 5e-5."""
DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"


def separate_logprobs(causal: Any, batch: PackedBatch) -> Tensor:
    """The truth: transformers' own logits, one path at a time [N]."""
    rows, start = [], 0
    for prompt, lengths in batch.spans:
        place = start + prompt
        for length in lengths:
            tokens = torch.cat(
                (batch.tokens[start : start + prompt], batch.tokens[place : place + length])
            )
            logits = causal(input_ids=tokens[None], use_cache=False).logits[0]
            found = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None]).squeeze(-1)
            rows.append(found[max(prompt - 1, 0) :])
            place += length
        start = place
    return torch.cat(rows)


@cache
def truth(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    module = family(name).module
    module.path = "separate"
    logprobs = separate_logprobs(module.causal, tree_batch())
    (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
    return logprobs.detach(), gradients(module.causal)


def check_against_truth(name: str, path: Any) -> None:
    logprobs, expected = truth(name)
    module = family(name).module
    module.path = path
    found = module(tree_batch(), token_logprobs)["logprobs"]
    (found * torch.linspace(-1, 2, len(found))).sum().backward()
    torch.testing.assert_close(found.detach(), logprobs, rtol=1e-5, atol=1e-5)
    actual = gradients(module.causal)
    assert actual.keys() == expected.keys()
    for parameter, gradient in expected.items():
        scale = float(gradient.abs().max()) + 1e-3
        torch.testing.assert_close(
            actual[parameter] / scale,
            gradient / scale,
            rtol=0,
            msg=parameter,
            atol=ROUNDING.get(name, 1e-5),
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_chosen_path_gives_the_models_logprobs_and_gradients(name: str) -> None:
    check_against_truth(name, family(name).choice.path)


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "GPT-OSS", "Llama 4"])
@pytest.mark.parametrize("path", ["packed", "padded", "separate"])
def test_every_path_below_tree_gives_the_same(name: str, path: str) -> None:
    check_against_truth(name, path)


@pytest.mark.parametrize("name", TREES)
def test_the_probe_chooses_tree_attention_if_it_is_right(name: str) -> None:
    choice = family(name).choice
    assert (choice.path, choice.reason) == ("tree", "")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "Inkling",
            "it has recurrent layers (hybrid_sliding), and packed failed with ValueError: tree "
            "attention has no position bias",
        ),
        ("RecurrentGemma", "it has recurrent layers (linear_attention)"),
        ("GLM 5", "it has sparse attention (indexed_attention)"),
    ],
)
def test_the_probe_pads_rows_for_the_others_and_says_why(name: str, reason: str) -> None:
    assert str(family(name).choice) == (f"padded rows with the model's own attention ({reason})")


class OwnAttention(transformers.LlamaForCausalLM):
    """A model whose code calls no attention but its own."""

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return False


def test_the_probe_pads_rows_for_a_model_with_attention_code_of_its_own() -> None:
    causal = OwnAttention(transformers.LlamaConfig(**FAMILIES["Llama"][1])).eval()
    engine = BareEngine(PackedModel(causal))
    assert str(choose_path(engine, Mesh())) == (  # type: ignore[arg-type]
        "padded rows with the model's own attention (its attention cannot be replaced)"
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_head_gives_the_models_logits(name: str) -> None:
    module = family(name).module
    module.path = "separate"
    tokens = torch.arange(3, 40)
    with torch.no_grad():
        own = module.causal(input_ids=tokens[None], use_cache=False).logits[0]
        hidden = module.backbone(input_ids=tokens[None])[0]
        head = read_head(module.causal)
        head = evolve(head, scale=module.form.scale, softcap=module.form.softcap)
        torch.testing.assert_close(head.logits(hidden), own)


@pytest.mark.parametrize(
    ("name", "scale", "softcap"),
    [
        ("Llama", 1.0, None),
        ("Gemma 2", 1.0, 3.0),
        ("Cohere 2", 0.0625, None),
        ("Granite", 0.25, None),
        ("MiniCPM 3", 4.0, None),
        ("RecurrentGemma", 1.0, 30.0),
        ("Inkling", 1 / 24, None),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_form_of_the_logits_is_found_whatever_its_settings_are_called(
    name: str, scale: float, softcap: float | None, precision: str
) -> None:
    module = family(name).module
    if precision == "bf16":
        module = PackedModel(random_model(name).bfloat16())
        choose_path(BareEngine(module, precision), Mesh())  # type: ignore[arg-type]
    assert module.form.scale == pytest.approx(scale, rel=1e-6 if precision == "fp32" else 1e-3)
    assert module.form.softcap == softcap


@pytest.mark.parametrize(
    "name", ["Mistral", "Gemma 2", "GPT-OSS", "Cohere 2", "Qwen3.5", "Bamba", "LFM2"]
)
def test_generation_under_our_attention_equals_the_models(name: str) -> None:
    module = family(name).module
    tokens = torch.randint(3, VOCABULARY, (2, 14), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    found = []
    for path in ("separate", "tree"):
        module.path = path
        found.append(
            module.model.generate(
                input_ids=tokens, attention_mask=mask, max_new_tokens=12, do_sample=False
            )
        )
    assert torch.equal(*found)


@pytest.mark.skipif(not DOCUMENT.exists(), reason="the pages are not here")
def test_the_document_is_the_result_of_the_probe() -> None:
    rows = re.findall(r"^\| ([^|]+?) \| (\w+) \|", DOCUMENT.read_text(), flags=re.MULTILINE)
    documented = {name: path for name, path in rows if name in FAMILIES}
    # The table is that of transformers 5.24.
    newer = dict.fromkeys(OWN_ATTENTION, "tree")
    assert documented == {name: family(name).choice.path for name in NAMES} | newer


@pytest.mark.parametrize(
    ("name", "scans"),
    [("Llama", 0), ("LFM2", 0), ("Qwen3.5", 1), ("Mamba 2", 2), ("RecurrentGemma", 2)],
)
def test_layers_with_a_recurrent_scan_are_counted(name: str, scans: int) -> None:
    causal = random_model(name)
    assert shape_of(PackedModel(causal)).scans == scans
