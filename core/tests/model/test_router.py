"""The load-balancing loss of mixtures of experts: transformers' own number for one example, and a
sum over examples."""

from typing import get_args

import pytest
import torch
from attrs import evolve
from small_models import SIZES, config_of, load, write_model
from transformers import LlamaConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rlhf.config.sections import LoraConfig, ModelConfig
from rlhf.data.example import Answer, Example
from rlhf.data.packing import pack
from rlhf.errors import RLHFError
from rlhf.model.packed import PathName
from rlhf.model.router import balance_loss
from rlhf.readouts import token_logprobs
from rlhf.train.context import router_note
from rlhf_devkit.families import tree_batch

EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.25}
CONFIGS = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, **EXPERTS),
    "qwen3": Qwen3MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=24, head_dim=16, decoder_sparse_step=1,
        **EXPERTS,
    ),
}  # fmt: skip
ROWS = ([5, 6, 7, 8, 9], [9, 8, 3], [4, 4, 4, 4, 11, 12, 13])


def packed(*rows):
    trees = [Example([3], [Answer(row)]) for row in rows]
    return pack(trees, range(len(trees)))


@pytest.mark.parametrize("family", CONFIGS)
def test_one_example_has_the_loss_of_transformers(tmp_path, family):
    module = load(config_of(write_model(tmp_path, CONFIGS[family])))
    assert module.router_loss == 0.25
    causal = module.causal
    expected = []
    for row in ROWS:
        module(packed(row), token_logprobs)
        ids = torch.tensor([[3, *row]])
        output = causal(ids, output_router_logits=True)
        expected.append(output.aux_loss)
        torch.testing.assert_close(module.router_losses[-1], expected[-1])
    module.router_losses.clear()
    module(packed(*ROWS), token_logprobs)
    (loss,) = module.router_losses
    torch.testing.assert_close(loss, torch.stack(expected).sum())
    loss.backward()
    routers = [value for name, value in module.named_parameters() if "gate.weight" in name]
    assert routers
    assert all(value.grad is not None and value.grad.any() for value in routers)


def test_tokens_of_no_example_do_not_count():
    torch.manual_seed(0)
    logits = [torch.randn(6, 4), torch.randn(6, 4)]
    example = torch.tensor([0, 0, 0, 1, -1, -1])
    loss = balance_loss(logits, example, examples=2, top=2)
    parts = [
        load_balancing_loss_func(tuple(layer[part] for layer in logits), 4, 2)
        for part in (slice(0, 3), slice(3, 4))
    ]
    torch.testing.assert_close(loss, sum(parts))


def test_recomputation_gives_the_same_gradient(tmp_path):
    path, grads = write_model(tmp_path, CONFIGS["mixtral"]), []
    for recompute in ("none", "full"):
        module = load(config_of(path, model={"recompute": recompute}))
        module.train()
        module(packed(*ROWS), token_logprobs)
        (loss,) = module.router_losses
        loss.backward()
        grads.append([item.grad for item in module.parameters() if item.grad is not None])
        assert len(module.router_losses) == 1
    torch.testing.assert_close(*grads)


def test_evaluations_and_dense_models_have_no_router_loss(tmp_path):
    module = load(config_of(write_model(tmp_path / "experts", CONFIGS["mixtral"])))
    with torch.no_grad():
        module(packed(*ROWS), token_logprobs)
    module.eval()
    module(packed(*ROWS), token_logprobs)
    assert module.router_losses == []
    assert load(config_of(write_model(tmp_path / "dense", LlamaConfig(**SIZES)))).router_loss == 0


def test_a_coefficient_without_effect_is_refused(tmp_path):
    dense = write_model(tmp_path / "dense", LlamaConfig(**SIZES))
    with pytest.raises(RLHFError) as error:
        load(config_of(dense, model={"router_loss": 0.01}))
    assert str(error.value) == (
        "model.router_loss has no effect: LlamaForCausalLM has no router that is trained; remove it"
    )
    experts = write_model(tmp_path / "experts", CONFIGS["mixtral"])
    assert load(config_of(experts, model={"router_loss": 0.0})).router_loss == 0
    adapted = config_of(experts, lora=LoraConfig(rank=2))
    assert load(adapted).router_loss == 0


def test_where_it_cannot_be_computed_a_line_says_so(tmp_path):
    module = load(config_of(write_model(tmp_path, CONFIGS["mixtral"])))
    assert router_note(module, ModelConfig()) == (
        "router     load-balancing loss times 0.25, over each example"
    )
    with pytest.raises(RLHFError) as error:
        router_note(module, ModelConfig(router_loss=0.25, kernels="compile"))
    assert str(error.value) == (
        "model.router_loss cannot be computed: the layers are compiled; set it to 0"
    )
    assert router_note(module, ModelConfig(kernels="compile")) == (
        "router     no load-balancing loss: the layers are compiled"
    )
    assert module.router_loss == 0


@pytest.mark.parametrize("family", CONFIGS)
def test_every_path_has_the_same_loss(tmp_path, family):
    module = load(config_of(write_model(tmp_path, CONFIGS[family])))
    module.train()
    batch = tree_batch()
    size = SIZES["vocab_size"]
    batch = evolve(batch, tokens=batch.tokens % size, predict=batch.predict % size)
    for path in get_args(PathName):
        module.path = path
        module(batch, token_logprobs)
    first, *others = module.router_losses
    for other in others:
        torch.testing.assert_close(other, first)
