"""The texts by which the weights of a server are compared with those of the trainer."""

import math

import pytest

from rlhf.errors import RLHFError
from rlhf_rollout_vllm.canary import canary_texts, check_canary


def test_texts_are_the_ends_of_prompts_that_differ() -> None:
    system = [1, *range(10, 90)]
    prompts = [[*system, number] for number in (3, 3, 4, 5, 6, 7) for _ in range(4)]
    texts = canary_texts(prompts, 100, 64)
    assert [text[-2:] for text in texts] == [[3, 99], [4, 99], [5, 99], [6, 99]]
    assert [len(text) for text in texts] == [33, 17, 63, 63]
    assert {text[0] for text in texts} == {1}
    assert texts[1] == [1, *range(76, 90), 4, 99]


def test_a_short_prompt_is_a_text_of_its_own() -> None:
    assert canary_texts([[5, 6], [7]], 100, 64) == [[5, 6, 99], [7, 99]]
    assert canary_texts([[5, 6, 7, 8, 9]], 100, 5) == [[5, 8, 9, 99]]


@pytest.mark.parametrize("wrong", [-2.5, math.nan])
def test_each_text_has_to_agree(wrong: float) -> None:
    own = [[-1.0] * 8, [-2.0] * 8]
    check_canary(own, own, limit=0.05, number=1)
    served = [[-1.0] * 8, [-2.0] * 7 + [wrong]]
    with pytest.raises(RLHFError) as error:
        check_canary(served, own, limit=0.05, number=3)
    mean = "-2.0625" if wrong == -2.5 else "nan"
    difference = "0.0625" if wrong == -2.5 else "nan"
    assert str(error.value) == (
        "after transfer 3 of the weights the server does not have them: the mean log-probability "
        f"of a text is {mean} there and -2 here, which differ by {difference} per token, more than "
        "rollouts.vllm.canary 0.05; look for the model's family and its dtype in docs/vllm.md"
    )
