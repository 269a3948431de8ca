"""The engine `embedded` on a CUDA device: graphs, their memory, and weights that change."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from rlhf.engine import Mesh
from rlhf.trainer import Sample
from rlhf_devkit.families import FAMILIES, VOCABULARY, llama
from rlhf_rollouts.embedded import Embedded
from rlhf_rollouts.graphs import Graphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda")
ROWS = 4
PROMPTS = [
    torch.randint(8, VOCABULARY, (size,), generator=torch.Generator().manual_seed(size)).tolist()
    for size in (7, 12, 1, 20, 9, 7, 30, 2, 5, 16)
]
"""More of them than rows, so that rows begin several answers one after the other."""


def engine_of(family: str) -> Any:
    """An engine whose module has what generation needs of a PackedModel."""
    kind, sizes = FAMILIES[family]
    torch.manual_seed(0)
    module = llama()
    module.model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes)).eval()
    return SimpleNamespace(module=module.to(CUDA), device=CUDA, precision="fp32", sharded=False)


def writer() -> Any:
    hooks: Any = SimpleNamespace(generation_context=lambda engine: nullcontext())
    config: Any = SimpleNamespace(batch=SimpleNamespace(budget=256 * ROWS))
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=2)
    return Embedded(config=config, tokenizer=tokenizer, mesh=Mesh(device=CUDA), hooks=hooks)


def answers(engine: Any, writer: Any) -> list[Sample]:
    samples: list[Sample] = writer.sample(
        engine, PROMPTS, seeds=[*range(len(PROMPTS))], max_new_tokens=60, max_tokens=128,
        ends=[5, 6], temperature=1.0,
    )  # fmt: skip
    return samples


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no more memory to rows than `batch.tokens` does."""
    monkeypatch.setattr("rlhf_rollouts.embedded.free_memory", lambda device: 0)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("family", ["Qwen2", "Falcon-H1"])
def test_answers_with_and_without_graphs_are_equal(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, embedded = engine_of(family), writer()
    replayed: list[Any] = []
    run = Graphs.run

    def watched(self: Graphs, key: Any, step: Any) -> None:
        replayed.append(key in self._graphs)
        run(self, key, step)

    monkeypatch.setattr(Graphs, "run", watched)
    with_graphs = answers(engine, embedded)
    assert embedded.notes == []
    assert any(replayed)
    replayed.clear()
    monkeypatch.setattr("rlhf_rollouts.embedded.captures", lambda device: False)
    without = answers(engine, embedded)
    assert not any(replayed)
    for sample, other in zip(with_graphs, without, strict=True):
        assert sample.tokens == other.tokens
        assert sample.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.usefixtures("few_rows")
def test_rollouts_keep_no_memory() -> None:
    engine, embedded = engine_of("Qwen2"), writer()
    reserved = []
    for _ in range(6):
        answers(engine, embedded)
        reserved.append(torch.cuda.memory_reserved(CUDA))
    assert embedded.notes == []
    assert reserved[1] == reserved[5]


@pytest.mark.usefixtures("few_rows")
def test_weights_that_change_in_place_change_the_answers() -> None:
    engine, embedded = engine_of("Qwen2"), writer()
    before = answers(engine, embedded)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1.1)
    after = answers(engine, embedded)
    again = answers(engine, writer())
    assert [one.tokens for one in before] != [one.tokens for one in after]
    assert [one.tokens for one in after] == [one.tokens for one in again]
