"""An error about a model's folder names its role and the setting that it comes from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import attrs
import pytest
from safetensors.torch import load_file, save_file
from small_models import SIZES, write_model
from transformers import LlamaConfig, LlamaForSequenceClassification

from rlhf.config.sections import Config, ModelConfig
from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.model.setting_names import setting_with
from rlhf.train.context import RunContext
from rlhf_devkit.gateways import build_gateways
from rlhf_devkit.plain import PlainBackend


@attrs.frozen(kw_only=True)
class PPOConfig:
    """The section of a trainer that loads a reward model."""

    reward_model: str = ""
    reward_model_revision: str | None = None


@attrs.frozen(kw_only=True)
class RunConfig(Config):
    """The configuration of a run of that trainer."""

    trainer_name: ClassVar[str] = "ppo"
    backend_name: ClassVar[str] = "plain"

    ppo: PPOConfig


def run_of(policy: str, reward_model: str = "") -> RunContext:
    config = RunConfig(
        model=ModelConfig(path=policy, dtype="fp32"), ppo=PPOConfig(reward_model=reward_model)
    )
    hooks, _ = build_gateways(PlainBackend())
    return RunContext(config=config, tokenizer=None, mesh=Mesh(), hooks=hooks, steps=1, longest=8)


def test_a_folder_in_a_list_of_sections_has_the_name_of_the_list() -> None:
    @attrs.frozen
    class Listed:
        rewards: tuple[PPOConfig, ...] = ()

    @attrs.frozen(kw_only=True)
    class ListedConfig(Config):
        trainer_name: ClassVar[str] = "own"

        own: Listed

    config = ListedConfig(own=Listed((PPOConfig(), PPOConfig(reward_model="runs/rm"))))
    assert setting_with(config, "runs/rm") == "own.rewards.reward_model"
    assert setting_with(config, "runs/other") == ""


def classifier(folder: Path) -> str:
    """What is wrong: a model with another head. Each of these writes a folder, and returns the end
    of the error."""
    LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)).save_pretrained(folder)
    return (
        f"{folder} is LlamaForSequenceClassification, whose head is not for TokenClassification; "
        "choose the language model it was trained from"
    )


def nothing(folder: Path) -> str:
    return f"{folder} does not exist; pass a model folder or a name on the hub"


def a_run(folder: Path) -> str:
    (folder / "model").mkdir(parents=True)
    (folder / "config.yaml").touch()
    return f"{folder} is a run folder; did you mean {folder}/model?"


def quantized(folder: Path) -> str:
    write_model(folder, LlamaConfig(**SIZES))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    return (
        f"{folder} has quantized weights (gptq), which cannot be used here; choose the model that "
        "they were made from, or unpack them once as docs/models.md shows"
    )


FAULTS = (classifier, nothing, a_run, quantized)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize(
    ("setting", "named"),
    [("ppo.reward_model", "critic: ppo.reward_model"), ("", "critic: ModelConfig.path")],
)
def test_the_setting_of_the_trainer_is_named(
    fault: Callable[[Path], str], setting: str, named: str, tmp_path: Path
) -> None:
    policy = write_model(tmp_path / "policy", LlamaConfig(**SIZES))
    folder = tmp_path / "critic"
    problem = fault(folder)
    run = run_of(policy, str(folder) if setting else "")
    with pytest.raises(RLHFError) as error:
        run.load("critic", model=ModelConfig(path=str(folder), dtype="fp32"), task="token")
    assert str(error.value) == f"{named} {problem}"


@pytest.mark.parametrize(("role", "prefix"), [("policy", ""), ("critic", "critic: ")])
def test_the_model_of_the_configuration_is_still_called_so(
    role: str, prefix: str, tmp_path: Path
) -> None:
    problem = classifier(tmp_path / "policy")
    run = run_of(str(tmp_path / "policy"))
    for model in (None, run.config.model):
        with pytest.raises(RLHFError) as error:
            run.load(role, model=model, task="token")
        assert str(error.value) == f"{prefix}model.path {problem}"


def test_an_adapter_in_place_of_a_model_is_not_told_to_be_the_policys(tmp_path: Path) -> None:
    policy = write_model(tmp_path / "policy", LlamaConfig(**SIZES))
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    for setting, name in ((str(folder), "ppo.reward_model"), ("", "ModelConfig.path")):
        with pytest.raises(RLHFError) as error:
            run_of(policy, setting).load("critic", model=ModelConfig(path=str(folder)))
        assert str(error.value) == (
            f"critic: {name} {folder} is an adapter; merge it first with rlhf merge"
        )


def test_missing_weights_name_the_role_and_its_setting(tmp_path: Path) -> None:
    policy = write_model(tmp_path / "policy", LlamaConfig(**SIZES))
    folder = Path(write_model(tmp_path / "critic", LlamaConfig(**SIZES)))
    model = ModelConfig(path=str(folder), dtype="fp32")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for setting, name in ((str(folder), "ppo.reward_model"), ("", "ModelConfig.path")):
        with pytest.raises(RLHFError) as error:
            run_of(policy, setting).load("judge", model=model, trained=False)
        assert str(error.value) == (
            f"judge: {folder} has no weights for model.norm.weight of LlamaForCausalLM: {name} "
            "must be a complete causal language model"
        )
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(RLHFError) as error:
        run_of(policy, str(folder)).load("judge", model=model, trained=False)
    assert str(error.value) == (
        f"judge: {folder}/model.safetensors is truncated, or not a safetensors file; download it "
        "again"
    )
