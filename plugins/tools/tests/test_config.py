"""`rlhf config`: every setting with its documentation, as YAML that reads back to the same."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import rlhf_tools.config  # noqa: F401  The fixture `install` hides torch and plugins.
from rlhf.cli import main
from rlhf_devkit.distributions import Install, install, toy

__all__ = ["install", "toy"]
GIVEN = ("--model", "tiny", "--data", "rows.jsonl")
Printed = Callable[..., str]


@pytest.fixture
def printed(toy: Path, install: Install, capsys: pytest.CaptureFixture[str]) -> Printed:
    """Returns what `rlhf config toy` prints with further words."""
    install("rlhf-tools", {"commands": {"config": "rlhf_tools:config_plugin"}})

    def text(*words: str) -> str:
        assert main(["config", "toy", *words]) == 0
        return capsys.readouterr().out

    return text


def test_config_prints_yaml_without_asking_for_model_and_data(printed: Printed) -> None:
    tree = yaml.safe_load(printed("--toy.beta", "0.5"))
    assert (tree["toy"]["beta"], tree["optim"]["lr"], tree["model"]["path"]) == (0.5, 1e-6, "")


@pytest.mark.parametrize("words", [[], ["--lora", "8"], [*GIVEN, "--data.eval", "[a, b]"]])
def test_the_printed_configuration_reads_back_to_the_same(
    printed: Printed, tmp_path: Path, words: list[str]
) -> None:
    text = printed(*words)
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert yaml.safe_load(printed(str(file))) == yaml.safe_load(text)
    assert max(len(line) for line in text.splitlines() if "#" in line) <= 100


def test_the_printed_configuration_documents_each_field(printed: Printed) -> None:
    text = printed("--lora.rank", "4")
    assert "with LoRA: ten times the default of toy" in " ".join(text.split())
    assert (
        "\n# A toy workflow.\ntoy:\n  # Strength of the toy.\n  beta: 0.1\n"
        "  # Which loss, with a text that is long enough to be wrapped over two lines of comment "
        "when it is\n  # printed: really. (one of sigmoid, hinge)\n  loss: sigmoid\n"
    ) in text
    off = printed()
    assert "\nlora: null\n  # Rank of the update.\n  # rank: 16\n" in off
    assert "An entry has path, subset, split, weight, limit, columns." in off
