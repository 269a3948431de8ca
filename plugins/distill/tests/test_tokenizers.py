"""A teacher must have the policy's tokenizer, not the size of its head."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, LlamaConfig

from rlhf.errors import RLHFError
from rlhf.plugin import ModelConfig
from rlhf_demo import base_model_folder
from rlhf_distill.teachers import shared_tokens


@frozen
class Section:
    """The trainer's own settings."""

    teacher: str


@frozen
class Settings:
    """What the check reads of a configuration."""

    model: ModelConfig
    kd: Section = Section("demo:base")
    trainer_name: str = "kd"


def folder_of(model: ModelConfig) -> Path:
    return base_model_folder() if model.path == "demo:base" else Path(model.path)


@frozen
class Models:
    """What the check reads of a run."""

    config: Settings
    tokenizer: Any
    examples: tuple[Any, ...] = ()

    def load_architecture(self, role: str = "policy", *, model: ModelConfig | None = None) -> Any:
        return AutoConfig.from_pretrained(folder_of(model or self.config.model))

    def load_tokenizer(self, model: ModelConfig) -> Any:
        return read_tokenizer(model)


def read_tokenizer(model: ModelConfig) -> Any:
    if not (folder_of(model) / "tokenizer.json").exists():
        raise RLHFError("no tokenizer")
    return AutoTokenizer.from_pretrained(folder_of(model))


TEACHER = ModelConfig(path="demo:base")


def shared(policy: Any, tokenizer: Any, *examples: Any, top: int | None = None) -> int | None:
    run: Any = Models(Settings(ModelConfig(path=str(policy))), tokenizer, examples)
    return shared_tokens(run, TEACHER, top=top)


def refused(policy: Any, tokenizer: Any, *examples: Any, top: int | None = None) -> str:
    with pytest.raises(RLHFError) as error:
        shared(policy, tokenizer, *examples, top=top)
    return str(error.value)


def padded(folder: Path, size: int) -> Path:
    """A policy's folder whose head has another size than that of the teacher, 295."""
    LlamaConfig(vocab_size=size, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


def changed(change: Callable[[dict[str, Any]], None]) -> Any:
    """The teacher's tokenizer after a change of what tokenizer.json has."""
    tokenizer = read_tokenizer(TEACHER)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    change(content)
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))
    return tokenizer


class Rows:
    """Examples of which one has the token 298."""

    def first_beyond(self, vocabulary: int) -> tuple[str, int] | None:
        return None if vocabulary > 298 else ("rows.jsonl line 7", 298)


def test_the_smaller_head_says_how_many_tokens_are_compared(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(TEACHER)
    assert shared("demo:base", tokenizer) is None
    assert shared(padded(tmp_path / "larger", 320), tokenizer, top=294) == 295
    assert shared(padded(tmp_path / "smaller", 290), tokenizer, Rows(), top=289) == 290
    assert refused(tmp_path / "larger", tokenizer, top=295) == (
        "kd.cache_top 295 must be less than the 295 tokens of the vocabulary; lower it, or remove "
        "it to run the teacher alongside the policy"
    )


def test_a_teacher_without_an_embedding_of_a_token_in_the_rows_is_refused(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(TEACHER)
    tokenizer.convert_ids_to_tokens = {298: "<|new|>"}.get
    assert refused(padded(tmp_path, 320), tokenizer, Rows()) == (
        "rows.jsonl line 7: kd.teacher demo:base has embeddings for 295 tokens but none for "
        "'<|new|>' (298); choose a teacher that knows all tokens of the rows"
    )


def test_a_teacher_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    settings = Settings(TEACHER, Section(str(tmp_path)))
    run: Any = Models(settings, read_tokenizer(TEACHER))
    with pytest.raises(RLHFError) as error:
        shared_tokens(run, ModelConfig(path=str(padded(tmp_path, 295))), top=None)
    assert str(error.value) == (
        f"kd.teacher {tmp_path} has no readable tokenizer, which must be the policy's; add its "
        "files to the folder"
    )


def test_the_first_token_that_differs_is_named() -> None:
    def rename(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary["!!"] = vocabulary.pop("!")

    number = read_tokenizer(TEACHER).get_vocab()["!"]
    assert refused("demo:base", changed(rename)) == (
        f"kd.teacher demo:base has another tokenizer than the policy demo:base: token {number} is "
        "'!' instead of '!!'; choose a teacher with the policy's tokenizer (docs/kd.md shows what "
        "another one can do)"
    )


def test_a_token_that_only_one_tokenizer_has_is_named(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(TEACHER)
    tokenizer.add_tokens(["<|tool|>"])
    # Both heads have a row for it.
    for policy in ("demo:base", padded(tmp_path, 320)):
        assert refused(policy, tokenizer) == (
            f"kd.teacher demo:base has another tokenizer than the policy {policy}: token 295 is "
            "missing instead of '<|tool|>'; choose a teacher with the policy's tokenizer "
            "(docs/kd.md shows what another one can do)"
        )


def test_other_merges_of_the_same_tokens_are_refused() -> None:
    def swap(content: dict[str, Any]) -> None:
        merges = content["model"]["merges"]
        merges[4], merges[5] = merges[5], merges[4]

    content = json.loads(read_tokenizer(TEACHER).backend_tokenizer.to_str())
    fifth, sixth = content["model"]["merges"][4:6]
    assert refused("demo:base", changed(swap)) == (
        "kd.teacher demo:base has another tokenizer than the policy demo:base: merge 4 is "
        f"{fifth} instead of {sixth}; choose a teacher with the policy's tokenizer (docs/kd.md "
        "shows what another one can do)"
    )


def test_what_does_not_decide_the_meaning_of_ids_may_differ() -> None:
    tokenizer = copy.deepcopy(read_tokenizer(TEACHER))
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.backend_tokenizer.enable_padding()
    tokenizer.backend_tokenizer.enable_truncation(9)
    assert shared("demo:base", tokenizer) is None
    assert shared("demo:base", changed(lambda content: content.update(post_processor=None))) is None


def test_a_teacher_whose_folder_no_setting_has_is_the_teacher() -> None:
    run: Any = Models(Settings(TEACHER, Section("")), read_tokenizer(TEACHER))
    run.tokenizer.add_tokens(["<|tool|>"])
    with pytest.raises(RLHFError) as error:
        shared_tokens(run, TEACHER, top=None)
    assert str(error.value).startswith("the teacher demo:base has another tokenizer than the ")


def test_a_teacher_is_compared_once_for_each_tokenizer() -> None:
    reads = []

    class Counted(Models):
        def load_tokenizer(self, model: ModelConfig) -> Any:
            reads.append(model)
            return read_tokenizer(model)

    tokenizer, other = read_tokenizer(TEACHER), ModelConfig(path="demo:base", revision="other")
    run: Any = Counted(Settings(TEACHER), tokenizer)
    # A run asks in its rehearsal and when it loads the teacher.
    again: Any = Counted(Settings(TEACHER), tokenizer)
    for each, model in ((run, TEACHER), (again, TEACHER), (run, other)):
        shared_tokens(each, model, top=None)
    new: Any = Counted(Settings(TEACHER), read_tokenizer(TEACHER))
    shared_tokens(new, TEACHER, top=None)
    assert reads == [TEACHER, other, TEACHER]
