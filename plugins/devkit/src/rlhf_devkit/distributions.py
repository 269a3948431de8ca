"""Fake distributions: metadata, entry points and modules in a temporary folder on sys.path."""

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import packaging.requirements  # noqa: F401  The fixture hides site-packages.
import pytest

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution beside rlhf-core 0.1.0; what is really installed cannot be found."""
    site = tmp_path / "site"
    written: set[str] = set()
    kept = [path for path in sys.path if "site-packages" not in path and "plugins" not in path]
    monkeypatch.setattr(sys, "path", kept)

    def write(
        name: str,
        groups: Mapping[str, Mapping[str, str]] | None = None,
        modules: Mapping[str, str] | None = None,
        *,
        version: str = "1.0",
        requires: Sequence[str] = (),
        folder: Path = site,
    ) -> Path:
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
        lines += [f"Summary: What {name} is", *(f"Requires-Dist: {line}" for line in requires)]
        (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        sections = [
            f"[rlhf.{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
            for group, entries in (groups or {}).items()
        ]
        (info / "entry_points.txt").write_text("\n".join(sections), encoding="utf-8")
        for module, source in (modules or {}).items():
            (folder / f"{module}.py").write_text(textwrap.dedent(source), encoding="utf-8")
            written.add(module)
        # Not syspath_prepend: its undo would leave the shortened path behind for other tests.
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        return folder

    write("rlhf-core", version="0.1.0")
    yield write
    for module in written:
        sys.modules.pop(module, None)


TOY = """
    from typing import Literal
    from attrs import field, frozen, validators
    from rlhf.errors import RLHFError
    from rlhf.plugin import ADAMW, BackendPlugin, OptimizerKind, TrainerPlugin

    @frozen(kw_only=True)
    class ToyConfig:
        '''A toy workflow.'''
        beta: float = field(default=0.1, validator=validators.gt(0))
        '''Strength of the toy.'''
        loss: Literal["sigmoid", "hinge"] = "sigmoid"
        '''Which loss, with a text that is long enough to be wrapped over two lines of comment when
        it is printed: really.'''

    @frozen(kw_only=True)
    class PlainConfig:
        '''One process.'''
        stage: Literal["auto", 0, 1] = "auto"
        '''Sharding.'''

    def check(config):
        if config.plain.stage == 1 and config.model.dtype == "fp16":
            raise RLHFError("plain.stage 1 cannot be combined with model.dtype fp16")

    trainer = TrainerPlugin(
        config=ToyConfig, trainer="toy_trainer:Toy", defaults={"optim.lr": 1e-6}, demo="toy.yaml"
    )
    signs = OptimizerKind(name="signs", about="Moves by the sign.", states=0, without=("eps",))
    backend = BackendPlugin(
        config=PlainConfig, hooks="toy_hooks:Plain", check=check, optimizers=(ADAMW, signs)
    )
"""
"""A trainer `toy` and a backend `plain`."""


@pytest.fixture
def toy(install: Install) -> Path:
    """The folder of an installed trainer `toy` with a backend `plain`."""
    groups = {
        "trainers": {"toy": "toy_plugin:trainer"},
        "backends": {"plain": "toy_plugin:backend"},
    }
    folder = install("rlhf-toy", groups, {"toy_plugin": TOY}, requires=["rlhf-core>=0.1,<0.2"])
    demo = "model: {path: tiny, dtype: fp32}\ndata: {train: toys.jsonl}\noptim: {lr: 2.0e-3}\n"
    (folder / "toy.yaml").write_text(demo, encoding="utf-8")
    return folder


WITH_WRONG_DEFAULTS = """
    from rlhf.plugin import TrainerPlugin
    from toy_plugin import ToyConfig

    defaults = {"optim.learning_rate": 1e-6, "train.log_every": 1.5}
    plugin = TrainerPlugin(config=ToyConfig, trainer="toy_trainer:Toy", defaults=defaults)
"""
"""The record of a trainer, beside `toy`, with defaults that are no settings."""
WRONG_DEFAULTS = (
    "has a wrong default: optim.learning_rate: 'learning_rate' is optim.lr here; "
    "train.log_every: expected a whole number, got 1.5"
)
"""What is said of it."""
