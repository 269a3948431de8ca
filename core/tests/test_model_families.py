"""Every family of docs/models.md: the probe's choice, hidden states, log-probabilities and
gradients."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve, frozen
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.engine import Mesh
from rlhf.model.head import read_head
from rlhf.model.packed import PackedModel
from rlhf.model.probe import AttentionPath, blank_batch, choose_path
from rlhf.readouts import token_logprobs

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
WINDOW = 8
VOCABULARY = 96

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OLD_SIZES = {
    "vocab_size": VOCABULARY,
    "n_positions": 256,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", SIZES),
    "Qwen2": ("Qwen2Config", SIZES | {"use_sliding_window": True, "max_window_layers": 1} | MIXED),
    "Qwen3": ("Qwen3Config", SIZES | {"head_dim": 8}),
    "Mistral": ("MistralConfig", SIZES | {"sliding_window": WINDOW}),
    "Mixtral": ("MixtralConfig", SIZES | EXPERTS | {"sliding_window": WINDOW}),
    "Gemma 2": (
        "Gemma2Config",
        SIZES
        | MIXED
        | {"head_dim": 8, "final_logit_softcapping": 3.0}
        | {"attn_logit_softcapping": 1.0},
    ),
    "Gemma 3": ("Gemma3TextConfig", SIZES | MIXED | {"head_dim": 8}),
    "Phi-3": ("Phi3Config", SIZES | {"sliding_window": WINDOW, "resid_pdrop": 0.0}),
    "GPT-OSS": (
        "GptOssConfig",
        SIZES
        | MIXED
        | EXPERTS
        | {"head_dim": 8, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    ),
    "Cohere 2": ("Cohere2Config", SIZES | MIXED),
    "Llama 4": (
        "Llama4TextConfig",
        SIZES
        | {"head_dim": 8, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 48}
        | {"num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "Granite": ("GraniteConfig", SIZES | {"logits_scaling": 4.0}),
    "Phi": ("PhiConfig", SIZES | {"resid_pdrop": 0.0}),
    "GPT-2": ("GPT2Config", OLD_SIZES),
    "GPT-J": ("GPTJConfig", OLD_SIZES | {"rotary_dim": 4}),
    "Mamba 2": (
        "Mamba2Config",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8}
        | {
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 1,
            "chunk_size": 16,
            "initializer_range": 0.2,
        },
    ),
    "Qwen3-Next": (
        "Qwen3NextConfig",
        SIZES
        | {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 16}
        | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "LFM2": ("Lfm2Config", SIZES | {"layer_types": ["conv", "full_attention"]}),
}
NAMES = tuple(FAMILIES)
TREES = tuple(name for name in NAMES if name not in ("GPT-J", "Mamba 2", "Qwen3-Next", "LFM2"))


class PlainEngine:
    """An engine without a backend: the module is called as it is."""

    stage, precision, role, device = 0, "fp32", "policy", torch.device("cpu")

    def __init__(self, module: PackedModel) -> None:
        self.module = module

    def __call__(self, batch: PackedBatch, readout: Any) -> Any:
        return self.module(batch, readout)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()


@frozen
class Family:
    """A tiny model of a family, and what the probe chose for it."""

    module: PackedModel
    choice: AttentionPath


@cache
def family(name: str) -> Family:
    config_class, options = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**options)
    causal = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in causal.parameters():
        # Biases, norms and sinks start at 0 and 1, where a wrong use of them does not show.
        parameter.data += 0.1 * torch.randn_like(parameter)
    module = PackedModel(causal.eval())
    return Family(module, choose_path(PlainEngine(module), Mesh()))  # type: ignore[arg-type]


def tree_batch() -> PackedBatch:
    """Three trees, longer than the window, one of them a chain; every answer token is predicted."""
    spans = ((13, (11, 9)), (0, (12,)), (5, (6, 3, 7)))
    total = 80
    tokens = torch.randint(3, VOCABULARY, (total,), generator=torch.Generator().manual_seed(1))
    batch = blank_batch(tokens, spans)
    places, answers, start, number = [], [], 0, 0
    for prompt, lengths in spans:
        place = start + prompt
        for length in lengths:
            for index in range(length):
                before = place + index - 1 if index else start + prompt - 1
                if before >= start:
                    places.append((before, place + index))
                    answers.append(number)
            place, number = place + length, number + 1
        start = place
    before, at = torch.tensor(places).T
    answer = torch.tensor(answers)
    return evolve(batch, predict_from=before, predict_at=at, predict=tokens[at], answer=answer)


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


def gradients(causal: Any) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in causal.named_parameters() if p.grad is not None}
    causal.zero_grad(set_to_none=True)
    return found


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
            actual[parameter] / scale, gradient / scale, rtol=0, atol=1e-5, msg=parameter
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_chosen_path_gives_the_models_own_logprobs_and_gradients(name: str) -> None:
    check_against_truth(name, family(name).choice.path)


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "GPT-OSS", "Llama 4"])
@pytest.mark.parametrize("path", ["packed", "padded", "separate"])
def test_every_path_below_tree_gives_the_same(name: str, path: str) -> None:
    check_against_truth(name, path)


@pytest.mark.parametrize("name", TREES)
def test_the_probe_takes_tree_attention_where_it_is_right(name: str) -> None:
    choice = family(name).choice
    assert (choice.path, choice.reason) == ("tree", "")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("GPT-J", "its attention cannot be exchanged"),
        ("Mamba 2", "it has recurrent layers (linear_attention)"),
        ("Qwen3-Next", "it has recurrent layers (linear_attention)"),
        ("LFM2", "it has recurrent layers (conv)"),
    ],
)
def test_the_probe_pads_rows_for_the_others_and_says_why(name: str, reason: str) -> None:
    assert str(family(name).choice) == (f"padded rows with the model's own attention ({reason})")


@pytest.mark.parametrize("name", NAMES)
def test_the_head_gives_the_models_own_logits(name: str) -> None:
    module = family(name).module
    module.path = "separate"
    tokens = torch.arange(3, 40)
    with torch.no_grad():
        own = module.causal(input_ids=tokens[None], use_cache=False).logits[0]
        hidden = module.backbone(input_ids=tokens[None])[0]
        torch.testing.assert_close(read_head(module.causal).logits(hidden), own)


@pytest.mark.parametrize("name", ["Mistral", "Gemma 2", "GPT-OSS", "Cohere 2"])
def test_generation_under_our_attention_is_the_models_own(name: str) -> None:
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


def test_the_document_is_the_result_of_the_probe() -> None:
    rows = re.findall(r"^\| ([^|]+?) \| (\w+) \|", DOCUMENT.read_text(), flags=re.MULTILINE)
    documented = {name: path for name, path in rows if name in FAMILIES}
    assert documented == {name: family(name).choice.path for name in NAMES}
