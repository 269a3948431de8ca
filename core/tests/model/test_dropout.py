"""Preference losses compare passes without noise; an export has the config of its base."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    MixtralConfig,
    PhimoeConfig,
    PretrainedConfig,
    RwkvConfig,
)

from rlhf.model.dropout import largest_dropout, without_noise
from rlhf.model.packed import PackedModel
from rlhf.model.save import save_weights
from rlhf_devkit.families import EXPERTS, OLD_SIZES, SIZES, tree_batch

NOISY = {
    "dropout": GPT2Config(**OLD_SIZES | {"resid_pdrop": 0.5, "embd_pdrop": 0.5}),
    "routers": PhimoeConfig(**SIZES | EXPERTS, router_jitter_noise=0.3, input_jitter_noise=0.3),
    "blocks": MixtralConfig(**SIZES | EXPERTS, router_jitter_noise=0.3),
}


def module_of(config: PretrainedConfig) -> PackedModel:
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    return PackedModel(AutoModelForCausalLM.from_config(config), path="separate")


def hidden(module: PackedModel) -> torch.Tensor:
    with torch.no_grad():
        return module.hidden(tree_batch())


@pytest.mark.parametrize("kind", NOISY)
def test_training_has_noise_unless_it_is_removed(kind: str) -> None:
    module = module_of(NOISY[kind])
    truth = hidden(module.eval())
    assert not torch.equal(hidden(module.train()), truth)
    without_noise(module)
    assert torch.equal(hidden(module.train()), truth)
    assert module.causal.training


def test_an_evaluation_changes_no_weights() -> None:
    sizes = {"vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 2, "context_length": 64}
    module = module_of(RwkvConfig(**sizes, rescale_every=1))
    before = {name: each.clone() for name, each in module.named_parameters()}
    module.path = "padded"
    trained = hidden(module.train())
    torch.testing.assert_close(hidden(module.eval()), trained)
    for name, each in module.named_parameters():
        assert torch.equal(each, before[name]), name


def test_an_export_has_the_dropout_of_its_base(tmp_path: Path) -> None:
    module = module_of(NOISY["dropout"])
    assert largest_dropout(module) == 0.5
    without_noise(module)
    save_weights(module.model, module.model.state_dict(), tmp_path)
    written: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    assert (written["resid_pdrop"], written["embd_pdrop"]) == (0.5, 0.5)
    assert (largest_dropout(module), module.causal.config.resid_pdrop) == (0.0, 0.0)
