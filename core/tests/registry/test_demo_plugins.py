"""`demo:NAME` of a distribution: its rows, its model, its settings."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.config.sections import DataEntry
from rlhf.config.source_names import without_revisions
from rlhf.data.files import Source
from rlhf.errors import RLHFError
from rlhf.model.architecture import resolved
from rlhf.registry.imports import demo_plugin
from rlhf.request.reader import read_config

DRAWN = """
    from pathlib import Path
    from rlhf.plugin import DemoPlugin

    def rows(split, format):
        return [{"text": f"{split} {format}"}]

    def settings(trainer):
        data = {"eval": {"path": "demo:drawn", "split": "eval"}}
        return {"model": {"path": "demo:drawn"}, "data": data, "batch": 8, trainer: {"beta": 0.5}}

    plugin = DemoPlugin(rows=rows, model_folder=lambda: Path("/drawn"), settings=settings)
"""


@pytest.fixture
def drawn(toy: Path, install: Callable[..., Path]) -> None:
    install("rlhf-drawn", {"demos": {"drawn": "drawn_demo:plugin"}}, {"drawn_demo": DRAWN})


def test_a_distribution_brings_rows_and_a_model(drawn: None) -> None:
    assert demo_plugin("demo:drawn").rows("eval", "prompt") == [{"text": "eval prompt"}]
    assert resolved("demo:drawn") == "/drawn"
    assert without_revisions("demo:drawn") == "the embedded model demo:drawn"


def test_without_a_model_its_settings_hold_below_the_users(drawn: None) -> None:
    config = read_config("toy", overrides=["--data", "demo:drawn", "--batch", "4"]).config
    assert config.model.path == "demo:drawn"
    assert config.data.train == (DataEntry(path="demo:drawn"),)
    assert config.data.eval == (DataEntry(path="demo:drawn", split="eval"),)
    assert (config.batch.size, config.own.beta) == (4, 0.5)
    words = ["--model", "tiny", "--data", "demo:drawn"]
    config = read_config("toy", overrides=words).config
    assert (config.model.path, config.data.eval, config.own.beta) == ("tiny", (), 0.1)


def test_a_demo_that_is_not_installed_is_named_with_its_package(drawn: None) -> None:
    text = (
        "demo 'shapes' is not installed (run `pip install rlhf-vision`); "
        "available: drawn (rlhf-drawn 1.0)"
    )
    for call in (
        lambda: Source(DataEntry(path="demo:shapes"), "train", "prompt").digest(),
        lambda: resolved("demo:shapes"),
        lambda: read_config("toy", overrides=["--data", "demo:shapes"]),
        lambda: read_config(
            "toy", overrides=["--data", "demo:drawn", "--data.eval", "demo:shapes"]
        ),
    ):
        with pytest.raises(RLHFError) as caught:
            call()
        assert str(caught.value) == text


def test_a_trainer_whose_demo_is_not_installed_names_its_package(toy: Path) -> None:
    demo = "model: {path: 'demo:base'}\ndata: {train: 'demo:arithmetic'}\n"
    (toy / "toy.yaml").write_text(demo)
    with pytest.raises(RLHFError) as error:
        read_config("toy")
    assert str(error.value) == (
        "demo 'base' is not installed (run `pip install rlhf-demo`); available: none"
    )
