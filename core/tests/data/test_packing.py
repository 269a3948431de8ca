"""Packed batches against a plain loop over every path, and the way through a worker process."""

import attrs
import numpy as np
import pytest

from rlhf.data.example import Answer, Example
from rlhf.data.packing import divided, filler, pack, prompt_inputs, with_answers

NAN = float("nan")
PAIR = Example(
    [1, 2, 3],
    [Answer([4, 5]), Answer([6, 7, 8], [False, True, True])],
    {"margin": 0.5, "rank": [1.0, 2.0], "label": [[NAN, 1.0], [NAN, NAN, 0.25]]},
)
BARE = Example(
    [], [Answer([9, 10, 11])], {"margin": -1.0, "rank": [3.0], "label": [[0.0, NAN, NAN]]}
)


def test_two_trees_are_packed_as_worked_by_hand() -> None:
    batch = pack([PAIR, BARE], [0, 1])
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 2]
    assert batch.example.tolist() == [0] * 8 + [1] * 3
    assert batch.branch.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 1, 1, 1]
    assert batch.predict_at.tolist() == [3, 4, 6, 7, 9, 10]
    assert batch.predict_from.tolist() == [2, 3, 5, 6, 8, 9]
    assert batch.predict.tolist() == [4, 5, 7, 8, 10, 11]
    assert batch.answer.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.answer_example.tolist() == [0, 0, 1]
    assert batch.answer_end.tolist() == [4, 7, 10]
    assert batch.spans == ((3, (2, 3)), (0, (3,)))
    assert batch.rows == (0, 1)


def test_the_first_token_of_a_second_answer_is_predicted_from_the_prompts_end() -> None:
    batch = pack([Example([1, 2], [Answer([3]), Answer([4])])], [0])
    assert batch.predict_from.tolist() == [1, 1]
    assert batch.predict_at.tolist() == [2, 3]


def test_values_are_per_example_answer_and_token() -> None:
    batch = pack([PAIR, BARE], [1, 0], round_to=8)
    assert batch.values["margin"].tolist() == [-1.0, 0.5]
    assert batch.values["rank"].tolist() == [3.0, 1.0, 2.0]
    label = batch.values["label"]
    known = ~label.isnan()
    assert known.nonzero().flatten().tolist() == [0, 7, 10]
    assert label[known].tolist() == [0.0, 1.0, 0.25]
    assert len(label) == len(batch.tokens) == 16


@pytest.mark.parametrize("seed", range(20))
def test_random_trees_agree_with_a_loop_over_their_paths(seed: int) -> None:
    draw = np.random.default_rng(seed)

    def tokens(low: int) -> list[int]:
        return draw.integers(1, 99, int(draw.integers(low, 9))).tolist()

    examples = []
    for _ in range(int(draw.integers(1, 6))):
        answers = [tokens(1) for _ in range(int(draw.integers(1, 4)))]
        masks = [(draw.random(len(answer)) < 0.7).tolist() for answer in answers]
        examples.append(
            Example(tokens(0), [Answer(a, m) for a, m in zip(answers, masks, strict=True)])
        )
    batch = pack(examples, range(len(examples)), round_to=16)
    wanted = []
    number = 0
    for example in examples:
        for answer in example.answers:
            path = [*example.prompt, *answer.tokens]
            for place, trained in enumerate(answer.trained or [], start=len(example.prompt)):
                if trained and place:
                    wanted.append((number, path[place - 1], path[place]))
            number += 1
    found = zip(
        batch.answer.tolist(),
        batch.tokens[batch.predict_from].tolist(),
        batch.predict.tolist(),
        strict=True,
    )
    assert list(found) == wanted
    assert batch.predict.equal(batch.tokens[batch.predict_at])
    assert len(batch.tokens) % 16 == 0


def test_rounding_stays_within_the_budget() -> None:
    assert len(pack([BARE], [0], round_to=8, at_most=5).tokens) == 5
    rounded = pack([BARE], [0], round_to=8, at_most=100)
    assert len(rounded.tokens) == 8
    assert rounded.example.tolist() == [0] * 3 + [-1] * 5


def test_a_filler_has_tokens_and_empty_values_but_no_examples() -> None:
    batch = filler()
    assert len(batch.tokens) == 2
    assert batch.example.tolist() == [-1, -1]
    assert (batch.num_examples, batch.num_answers, len(batch.predict)) == (0, 0, 0)
    empty = pack([PAIR], [], round_to=4)
    assert len(empty.tokens) == 4
    assert len(empty.values["margin"]) == len(empty.values["rank"]) == 0
    assert empty.values["label"].isnan().all()


def test_extra_inputs_follow_each_other() -> None:
    rows = [Example([1], [Answer([2])], {}, {"pixels": [[float(n)]]}) for n in range(2)]
    assert pack(rows, [0, 1]).inputs["pixels"].tolist() == [[0.0], [1.0]]


def pictured(prompt: list[int], *answers: list[int], rows: list[int]) -> Example:
    """An example with so many rows of pixels for its prompt and each answer, of two numbers each,
    the first of which is the number of the row."""
    pixels = [[float(n), 1.0] for n in range(sum(rows))]
    tokens = sum(map(len, [prompt, *answers]))
    return Example(
        prompt,
        [Answer(answer) for answer in answers],
        {},
        {
            "pixels": np.array(pixels, np.float32).reshape(-1, 2),
            "token_type_ids": np.ones(tokens, np.int64),
            "segment_rows": np.array(rows)[:, None],
        },
    )


TEXT = pictured([1, 2], [3], rows=[0, 0])
PICTURED = [TEXT, pictured([1, 2, 3], [4], [5, 6], rows=[1, 0, 2]), pictured([8], [9], rows=[1, 0])]


def test_rows_of_inputs_are_counted_for_each_prompt_and_answer() -> None:
    batch = pack(PICTURED, [1, 0], round_to=4)
    assert batch.inputs["pixels"].tolist() == [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]
    assert batch.input_rows == {"pixels": (1, 0, 2, 0, 0)}
    assert batch.inputs["token_type_ids"].tolist() == [1] * 9 + [0] * 3
    assert (len(batch.tokens), batch.blank) == (12, 0)


def test_a_batch_without_images_gets_the_smallest_example_with_images_as_its_blank() -> None:
    batch = pack(PICTURED, [0, 0])
    assert batch.tokens.tolist() == [1, 2, 3, 1, 2, 3, 8, 9]
    assert batch.example.tolist() == [0, 0, 0, 1, 1, 1, -1, -1]
    assert (batch.num_tokens, batch.blank, len(batch.predict)) == (6, 2, 2)
    assert batch.input_rows == {"pixels": (0, 0, 0, 0, 1)}
    empty = pack(PICTURED, [], round_to=4)
    assert empty.tokens.tolist() == [8, 9, 0, 0]
    assert empty.example.tolist() == [-1] * 4
    assert (empty.spans, empty.blank, empty.input_rows) == ((), 2, {"pixels": (1,)})


def test_without_any_image_a_batch_has_no_inputs() -> None:
    for batch in (pack([TEXT], [0]), pack([TEXT], [])):
        assert (batch.inputs, batch.input_rows, batch.blank) == ({}, {}, 0)


def test_inputs_of_different_shapes_end_in_zeros() -> None:
    rows = [Example([1], [Answer([2])], {}, {"x": np.ones((1, n, 3 - n))}) for n in (1, 2)]
    assert pack(rows, [0, 1]).inputs["x"].tolist() == [
        [[1.0, 1.0], [0.0, 0.0]],
        [[1.0, 0.0], [1.0, 0.0]],
    ]


def test_the_inputs_of_a_prompt_go_on_after_its_largest_position() -> None:
    positions = np.array([[0, 0, 0], [1, 1, 1], [1, 1, 2], [3, 3, 3], [4, 4, 4], [5, 5, 5]])
    example = pictured([1, 2, 3], [4], [5, 6], rows=[1, 0, 2])
    example.inputs["position_ids"] = positions  # type: ignore[index]
    found = prompt_inputs(example, 2)
    assert found["pixels"].tolist() == [[0.0, 1.0]]
    assert found["token_type_ids"].tolist() == [1, 1, 1, 0, 0]
    assert found["position_ids"][:, 2].tolist() == [0, 1, 2, 3, 4]
    assert "segment_rows" not in found
    assert prompt_inputs(Example([1], [Answer([2])]), 3) == {}


def test_each_of_several_new_answers_follows_the_prompt_with_its_images() -> None:
    own = pictured([1, 2, 3], [4], [5, 6], rows=[1, 0, 2])
    inputs = own.inputs | {"position_ids": np.array([0, 4, 1, 3, 4, 5])[:, None]}
    example = attrs.evolve(own, inputs=inputs)
    made = with_answers(example, [Answer([7, 8]), Answer([9])], {"reward": [0.0, 1.0]})
    assert made.inputs["position_ids"][:, 0].tolist() == [0, 4, 1, 5, 6, 5]
    assert made.inputs["token_type_ids"].tolist() == [1, 1, 1, 0, 0, 0]
    assert (made.inputs["pixels"].tolist(), made.values) == ([[0.0, 1.0]], {"reward": [0.0, 1.0]})
    # Beside a row with images in its answers, and divided, each part with the prompt's images.
    batch = pack([own, made], [0, 1])
    assert batch.input_rows == {"pixels": (1, 0, 2, 1, 0, 0)}
    parts = divided(made, 5)
    assert [len(part.inputs["token_type_ids"]) for part in parts] == [5, 4]
    assert [part.inputs["position_ids"][-1].tolist() for part in parts] == [[6], [5]]
    assert all(part.inputs["pixels"].tolist() == [[0.0, 1.0]] for part in parts)
