"""Models and tokenizers with Python code of their own: nothing asks whether to run it."""

import json
import os
import pty
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_models import SIZES, config_of, write_model
from transformers import LlamaConfig

from rlhf.commands.merge import merge_command
from rlhf.config.sections import ModelConfig
from rlhf.errors import RLHFError
from rlhf.model.architecture import read_architecture
from rlhf.model.exported import exported_model, exported_tokenizer
from rlhf.model.setting_names import name_in_errors
from rlhf.model.tokenizer import read_tokenizer
from rlhf_devkit import scratch

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
SETTING = "; read that code, and set model.trust_remote_code to true to run it"
SCRIPT = (
    ", which only runs and rlhf export may run; use transformers and peft in a script of your "
    "own, with trust_remote_code=True"
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model with Python code of its own for its class and its tokenizer."""
    folder = tmp_path / "base"
    scratch.make(folder)
    write_model(folder, LlamaConfig(**SIZES))
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    change(folder / "config.json", model_type="own", auto_map=names)
    tokenizer = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=tokenizer)
    (folder / "own.py").write_text(CODE)
    return folder


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture(params=["closed pipe", "terminal"])
def standard_input(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Standard input, of which a question would be an error, or would wait for ever."""
    if request.param == "terminal":
        ours, theirs = pty.openpty()
    else:
        theirs, ours = os.pipe()
    if request.param == "closed pipe":
        os.close(ours)
    with os.fdopen(theirs, encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", file)
        yield
    if request.param == "terminal":
        os.close(ours)


@pytest.mark.usefixtures("standard_input")
def test_nothing_asks_whether_to_run_the_code_of_a_model(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    plain = ModelConfig(path=write_model(tmp_path / "plain", LlamaConfig(**SIZES)))
    needs = "needs Python code that comes with it"
    cases: dict[str, Callable[[], object]] = {
        f"model.path {base} {needs}{SETTING}": lambda: read_architecture(config_of(str(base))),
        f"the tokenizer in {base} {needs}{SETTING}": lambda: read_tokenizer(
            ModelConfig(path=plain.path, tokenizer=str(base))
        ),
        f"{base} {needs}{SCRIPT}": lambda: exported_model(base, "causal"),
        f"the tokenizer in {base} {needs}{SCRIPT}": lambda: exported_tokenizer(base),
        f"the base model {base} of {adapter} {needs}{SCRIPT}": lambda: merge_command(
            str(adapter), str(tmp_path / "merged")
        ),
    }
    for text, call in cases.items():
        with pytest.raises(RLHFError) as caught:
            call()
        assert str(caught.value) == text
    assert "[y/N]" not in capfd.readouterr().out


def test_the_user_may_run_the_code_of_a_model(base: Path) -> None:
    model = ModelConfig(path=str(base), trust_remote_code=True)
    config = config_of(str(base), model={"trust_remote_code": True})
    assert type(read_architecture(config)).__name__ == "OwnConfig"
    assert type(read_tokenizer(model)).__name__ == "OwnTokenizer"


def test_the_permission_has_the_name_that_the_user_sets() -> None:
    other = ModelConfig(path="other")
    assert name_in_errors(config_of("mine"), other, "trust_remote_code") == (
        "model.trust_remote_code"
    )
    # The user has set it, and the trainer did not pass it on.
    allowed = config_of("mine", model={"trust_remote_code": True})
    assert name_in_errors(allowed, other, "trust_remote_code") == "ModelConfig.trust_remote_code"
