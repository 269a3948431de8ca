"""Sizes of small random models, and models of these sizes in folders."""

from pathlib import Path
from typing import Any

import torch
from engines import WholeWeights
from transformers import AutoModelForCausalLM

from rlhf.config.sections import Config, ModelConfig
from rlhf.engine import Mesh, Plan
from rlhf.model.load import load_model
from rlhf.model.role import ModelSpec
from rlhf.model.shape import empty_model

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}


def load(config: Config, *, stage: int = 0, precision: str = "fp32") -> Any:
    """Load the policy of `config` as a single rank does."""
    plan = Plan(sharded=stage == 3, precision=precision)
    return load_model(ModelSpec(config=config), plan=plan, mesh=Mesh(), hooks=WholeWeights())


def empty(config: Config) -> Any:
    """Return the policy of `config` without values."""
    return empty_model(ModelSpec(config=config), Mesh())


def write_model(folder: Path, config: Any) -> str:
    """Write a model with random weights into `folder` and return its path."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def loaded_from_hub(cache: Path, name: str) -> Path:
    """Return an empty folder as huggingface_hub keeps a repository `name` that has been loaded."""
    kept = cache / f"models--{name.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("commit")
    (kept / "snapshots" / "commit").mkdir(parents=True)
    return kept / "snapshots" / "commit"


def config_of(path: str, **sections: Any) -> Config:
    """Return a configuration with the model at `path`."""
    model = sections.pop("model", {})
    return Config(model=ModelConfig(path=path, **model), **sections)
