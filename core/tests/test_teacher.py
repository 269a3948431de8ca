"""A teacher must have the policy's tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
from attrs import frozen
from transformers import LlamaConfig

from rlhf.config.sections import ModelConfig
from rlhf.errors import RLHFError
from rlhf.model.tokenizer import read_tokenizer
from rlhf.reference.teacher import check_teacher


@frozen
class Settings:
    """What the check reads of a configuration."""

    model: ModelConfig
    trainer_name: str = "kd"


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


def test_other_tokens_of_the_same_number_are_refused() -> None:
    vocabulary = read_tokenizer(TEACHER).get_vocab()
    last = max(vocabulary, key=vocabulary.__getitem__)
    own = {**vocabulary, "<|other|>": vocabulary[last]}
    del own[last]
    tokenizer = SimpleNamespace(get_vocab=lambda: own)
    first = min(last, "<|other|>")
    assert refused("demo:base", tokenizer) == (
        "kd.teacher demo:base has different tokens than the policy demo:base, although both have "
        f"295 (the first is {first!r}, {vocabulary[last]}); choose a teacher with the policy's "
        "tokenizer"
    )
