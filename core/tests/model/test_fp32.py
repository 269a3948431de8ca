"""Parameters that transformers keeps in fp32 in a model of 16 bits: routers, decays, and others."""

from pathlib import Path
from typing import Any

import every_type
import pytest
import torch
from safetensors.torch import load_file
from small_models import config_of, empty, load
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig

from rlhf.config.sections import LoraConfig, OptimConfig
from rlhf.model.shape import shape_of
from rlhf.model.trainable import parameter_groups

FEW = ("deepseek_v3", "ernie4_5_moe", "hy_v4", "olmo_hybrid")
OTHERS = (
    "afmoe", "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v32", "deepseek_v4",
    "dots1", "dots3_note_text", "exaone_moe", "flint", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
    "hunyuan_v1_moe", "hy_v3", "inkling2_loop_text", "inkling2_text", "inkling_text", "kimi_linear",
    "kolibri1", "lfm2_moe", "mimo_v2_flash", "nemotron_h", "sarvam_mla", "sarvam_moe", "solar_open",
)  # fmt: skip


@pytest.fixture(params=[*FEW, *(pytest.param(each, marks=pytest.mark.matrix) for each in OTHERS)])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny model of a type as its authors would publish it: in bf16, some tensors in fp32."""
    if request.param not in every_type.TEXT:
        pytest.skip(f"transformers has no {request.param}")
    return published(every_type.tiny_model(request.param), tmp_path)


def published(causal: Any, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    causal.save_pretrained(folder / "fp32")
    plain = AutoModelForCausalLM.from_pretrained(folder / "fp32", dtype=dtype)
    plain.save_pretrained(folder / "base")
    return folder / "base"


def dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in module.state_dict().items()}


def logits(causal: Any, plain: Any) -> torch.Tensor:
    """The logits of a model with the attention of another one."""
    causal.set_attn_implementation(plain.config._attn_implementation)
    with torch.no_grad():
        return causal.eval()(input_ids=torch.arange(3, 40)[None], use_cache=False).logits


def test_a_model_in_bf16_is_that_of_plain_transformers(base: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    expected = dtypes(plain)
    assert torch.float32 in expected.values()
    config = config_of(str(base), model={"dtype": "bf16"})
    parameters = {name: item.dtype for name, item in plain.named_parameters()}
    without_values = empty(config)
    assert {name: it.dtype for name, it in without_values.causal.named_parameters()} == parameters
    drawn = load(config_of(str(base), model={"dtype": "bf16", "init": "random"}), precision="bf16")
    assert {name: item.dtype for name, item in drawn.causal.named_parameters()} == parameters
    whole, sharded = (load(config, stage=stage, precision="bf16") for stage in (0, 3))
    for module in (whole, sharded):
        assert dtypes(module.causal) == expected
        assert torch.equal(logits(module.causal, plain), logits(plain, plain))

    (tmp_path / "export").mkdir()
    whole.save_weights(whole.state_dict(), tmp_path / "export")
    before, after = (load_file(tmp_path / at / "model.safetensors") for at in ("base", "export"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype, name
        assert torch.equal(after[name], value), name


def test_the_shape_and_the_optimizer_know_what_is_in_fp32(tmp_path: Path) -> None:
    base = published(every_type.tiny_model("deepseek_v3"), tmp_path)
    module = empty(config_of(str(base), model={"dtype": "bf16"}))
    routers = sum(
        item.numel() for name, item in module.named_parameters() if name.endswith("gate.weight")
    )
    shape = shape_of(module)
    assert shape.fp32 == shape.fp32_trainable == routers > 0
    groups = parameter_groups(module, OptimConfig(weight_decay=0.1))
    assert [(group["params"][0].dtype, group["weight_decay"]) for group in groups] == [
        (torch.bfloat16, 0.1),
        (torch.bfloat16, 0.0),
        (torch.float32, 0.1),
    ]
    for group in groups:
        assert len({item.dtype for item in group["params"]}) == 1
    adapted = config_of(str(base), model={"dtype": "bf16"}, lora=LoraConfig(rank=2))
    shape = shape_of(empty(adapted))
    assert (shape.fp32, shape.fp32_trainable) == (routers, 0)


def test_fp16_keeps_more_in_fp32_than_bf16(tmp_path: Path) -> None:
    sizes = every_type.SIZES
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    given = {name: sizes[name] for name in (*names, "num_key_value_heads", "num_local_experts")}
    config = GptOssConfig(**given, intermediate_size=32, num_experts_per_tok=2)
    base = published(AutoModelForCausalLM.from_config(config), tmp_path)
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        module = empty(config_of(str(base), model={"dtype": precision}))
        expected = {name: item.dtype for name, item in plain.named_parameters()}
        assert {name: item.dtype for name, item in module.causal.named_parameters()} == expected
        assert (torch.float32 in expected.values()) == (precision == "fp16")
