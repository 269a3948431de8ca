"""A teacher must have the policy's tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from rlhf.config.sections import ModelConfig
from rlhf.errors import RLHFError
from rlhf.model.tokenizer import load_tokenizer
from rlhf.reference.teacher import check_vocabulary


def policy_and_teacher(folder: Any, path: str) -> tuple[Any, Any]:
    return tuple(
        SimpleNamespace(
            model=ModelConfig(path=str(name)),
            data=SimpleNamespace(chat_template=None),
            trainer_name="kd",
        )
        for name in (folder, path)
    )


def test_another_vocabulary_is_refused_with_both_sizes(tmp_path: Any) -> None:
    LlamaConfig(vocab_size=99, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    policy, teacher = policy_and_teacher(tmp_path, "demo:base")
    with pytest.raises(RLHFError) as error:
        check_vocabulary(policy, teacher, tokenizer=None)
    assert str(error.value) == (
        f"kd.teacher demo:base has 295 tokens but the policy {tmp_path} has 99; choose a teacher "
        "with the policy's vocabulary"
    )


def test_other_tokens_of_the_same_number_are_refused() -> None:
    policy, teacher = policy_and_teacher("demo:base", "demo:base")
    vocabulary = load_tokenizer(teacher).get_vocab()
    last = max(vocabulary, key=vocabulary.__getitem__)
    own = {**vocabulary, "<|other|>": vocabulary[last]}
    del own[last]
    tokenizer = SimpleNamespace(get_vocab=lambda: own)
    with pytest.raises(RLHFError) as error:
        check_vocabulary(policy, teacher, tokenizer)
    first = min(last, "<|other|>")
    assert str(error.value) == (
        "kd.teacher demo:base has different tokens than the policy demo:base, although both have "
        f"295 (the first is {first!r}, {vocabulary[last]}); choose a teacher with the policy's "
        "tokenizer"
    )
