"""Runs over twelve pairs with a tiny policy, up to their first step."""

import json
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf.config.sections import (
    BatchConfig,
    Config,
    DataConfig,
    DataEntry,
    ModelConfig,
    OptimConfig,
)
from rlhf.data.batch import PackedBatch
from rlhf.data.example import Example
from rlhf.data.packing import pack
from rlhf.data.tokenise import prepare
from rlhf.engine import Mesh
from rlhf.model.tokenizer import load_tokenizer
from rlhf.readouts import token_logprobs
from rlhf.train.context import RunContext
from rlhf.trainer import Loss, Trainer
from rlhf_demo import rows
from rlhf_devkit import scratch
from rlhf_devkit.gateways import build_gateways
from rlhf_devkit.plain import PlainBackend


@attrs.frozen(kw_only=True)
class PairConfig(Config):
    """The configuration of a trainer `pairs`."""

    trainer_name: ClassVar[str] = "pairs"
    backend_name: ClassVar[str] = "none"

    pairs: None = None


class Pairs(Trainer):
    """A trainer of which only `example` is used."""

    row_format = "preference"

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Any) -> None: ...

    def loss(self, batch: PackedBatch) -> Loss:
        return Loss(())


def write_inputs(folder: Path) -> Path:
    """Write a Llama of two layers with attention dropout, and twelve pairs."""
    scratch.make(folder / "model")
    config = LlamaConfig.from_pretrained(folder / "model", attention_dropout=0.5)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 32, 64, 2
    config.head_dim = 8
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    pairs = rows("arithmetic", "train", "preference")[:12]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


def make_run(
    folder: Path, *, steps: int = 9, extra: dict[str, Any] | None = None, **sections: Any
) -> RunContext:
    """Return a run over the twelve pairs whose policy is loaded and in training mode."""
    sections.setdefault("model", ModelConfig(path=str(folder / "model"), dtype="fp32"))
    config = PairConfig(
        data=DataConfig(train=(DataEntry(path=str(folder / "pairs.jsonl")),)),
        batch=BatchConfig(size=4, tokens=256),
        optim=OptimConfig(lr=1e-2, warmup=0.0),
        **sections,
    )
    tokenizer = load_tokenizer(config)
    examples = prepare(config, Pairs(None, tokenizer), tokenizer, which="train")
    hooks, _ = build_gateways(PlainBackend())
    longest = int(examples.longest_path.max())
    run = RunContext(
        config=config, tokenizer=tokenizer, mesh=Mesh(), hooks=hooks, steps=steps, longest=longest,
        examples=(examples,),
    )  # fmt: skip
    run.load("policy", extra=extra, dropout=False).train()
    return run


def take_a_step(run: RunContext, batch: PackedBatch) -> None:
    """Move the policy's weights."""
    policy = run.roles["policy"].engine
    policy.backward(-policy(batch, token_logprobs)["logprobs"].mean() * 100, last=True)
    assert policy.step().moved


def packed(run: RunContext) -> PackedBatch:
    """Return three of the pairs as a batch."""
    return pack(run.examples[0], [0, 5, 7])


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Return a copy of the weights of an engine."""
    return {name: value.clone() for name, value in engine.module.state_dict().items()}
