"""Fits of a small run."""

from pathlib import Path

import attrs
import torch

from rlhf.engine import Mesh
from rlhf.memory.fit import StepFit
from rlhf.request.reader import read_config
from rlhf.train.dataset import prepare_data
from rlhf.train.set_up import step_fit
from rlhf_devkit import tiny
from rlhf_devkit.gateways import build_gateways
from rlhf_devkit.plain import PlainBackend


def small_run(folder: Path) -> list[str]:
    """The words of a run of 12 rows alike, four a step."""
    rows = [{"prompt": "one and two are", "completion": " three" * 20} for _ in range(12)]
    return [
        "--model", str(tiny.make_model(folder / "model")), "--model.dtype", "fp32",
        "--data", str(tiny.write_rows(folder / "rows.jsonl", rows)),
        "--batch.size", "4", "--output", str(folder / "run"),
    ]  # fmt: skip


def fit_of(words: list[str], memory: int, backend: PlainBackend | None = None) -> StepFit:
    """The fit of a run on a device of so many bytes."""
    request = read_config("sft", overrides=words)
    hooks, _ = build_gateways(backend or PlainBackend())
    return step_fit(request.config, prepare_data(request), Mesh(memory=memory), hooks)


def on_accelerator(words: list[str], memory: int) -> StepFit:
    """The same on a device that is not the host."""
    fit = fit_of(words, memory)
    return attrs.evolve(fit, mesh=Mesh(device=torch.device("cuda", 0), memory=memory))


def peak_with(level: str, words: list[str]) -> int:
    """Bytes at the peak on an accelerator, under a level of recomputation."""
    peak = on_accelerator([*words, "--model.recompute", level], 2**30).peak
    assert peak is not None
    return peak
