"""A teacher must have the policy's tokens."""

from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from transformers import LlamaConfig

from rlhf.config.sections import ModelConfig
from rlhf.errors import RLHFError
from rlhf.model.tokenizer import read_tokenizer
from rlhf.reference import teacher as teachers
from rlhf.reference.teacher import check_teacher


@frozen
class Section:
    """The trainer's own settings."""

    teacher: str


@frozen
class Settings:
    """What the check reads of a configuration."""

    model: ModelConfig
    kd: Section = Section("demo:base")


class Tokenizer:
    def __init__(self, vocabulary: dict[str, int]) -> None:
        self.get_vocab = lambda: vocabulary


TEACHER = ModelConfig(path="demo:base")


def refused(policy: Any, tokenizer: Any, top: int | None = None) -> str:
    settings: Any = Settings(ModelConfig(path=str(policy)))
    with pytest.raises(RLHFError) as error:
        check_teacher(settings, TEACHER, tokenizer, top=top)
    return str(error.value)


def test_another_vocabulary_is_refused_with_both_sizes(tmp_path: Any) -> None:
    LlamaConfig(vocab_size=99, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    assert refused(tmp_path, None) == (
        f"kd.teacher demo:base has 295 tokens but the policy {tmp_path} has 99; choose a teacher "
        "with the policy's vocabulary"
    )


def test_an_adapter_as_a_teacher_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    settings: Any = Settings(ModelConfig(path="demo:base"), Section(str(tmp_path)))
    with pytest.raises(RLHFError) as error:
        check_teacher(settings, ModelConfig(path=str(tmp_path)), None, top=None)
    assert str(error.value) == (
        f"kd.teacher {tmp_path} is an adapter; merge it first with rlhf merge"
    )


def test_other_tokens_of_the_same_number_are_refused() -> None:
    vocabulary = read_tokenizer(TEACHER).get_vocab()
    last = max(vocabulary, key=vocabulary.__getitem__)
    own = {**vocabulary, "<|other|>": vocabulary[last]}
    del own[last]
    tokenizer = Tokenizer(own)
    first = min(last, "<|other|>")
    assert refused("demo:base", tokenizer) == (
        "kd.teacher demo:base has different tokens than the policy demo:base, although both have "
        f"295 (the first is {first!r}, {vocabulary[last]}); choose a teacher with the policy's "
        "tokenizer"
    )


def test_a_teacher_is_compared_once_for_each_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Any = Settings(ModelConfig(path="demo:base"))
    tokenizer, reads = read_tokenizer(TEACHER), []

    def read(model: ModelConfig) -> Any:
        reads.append(model)
        return tokenizer

    monkeypatch.setattr(teachers, "read_tokenizer", read)
    for _ in range(2):
        check_teacher(settings, TEACHER, tokenizer, top=None)
    other = ModelConfig(path="demo:base", revision="other")
    check_teacher(settings, other, tokenizer, top=None)
    check_teacher(settings, TEACHER, read_tokenizer(TEACHER), top=None)
    assert reads == [TEACHER, other, TEACHER]
