"""Messages mean what their authors mean, whichever project, column or spelling they come from."""

import json
from typing import Any

import pytest
from chat_templates import CHATML, GEMMA, NAMED, TOOLS, calls_as, tokenizer_of
from read_rows import read_rows

from rlhf.errors import RLHFError
from rlhf_rows import Reader, Row

USER = {"role": "user", "content": "What is two?"}
GOOD = {"role": "assistant", "content": "one and one"}
BAD = {"role": "assistant", "content": "yes, no"}
SYSTEM = {"role": "system", "content": "be kind"}
TALK = [USER, GOOD]
STRICT_CALLS = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}{{ '<|im_start|>assistant\n' + "
    "m.tool_calls[0].function | tojson + '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + "
    "'\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template that asks whether a message has calls as the one of Llama 3.1 does."""
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nhelp<|im_end|>\n' }}{% endif %}"
    + CHATML
)


def read(format: str, row: dict[str, Any], template: str | None = CHATML) -> list[Row]:
    reader = Reader(tokenizer_of("bytes", template))
    return read_rows(format, [("rows.jsonl line 1", row)], reader)[0]


def texts(format: str, row: dict[str, Any], template: str | None = CHATML) -> list[str]:
    """Each prompt and answer that a row becomes, as text."""
    tokenizer = tokenizer_of("bytes", template)
    rows = read(format, row, template)
    return [
        tokenizer.decode(ids)
        for row in rows
        for ids in (row.prompt, *(answer.tokens for answer in row.answers))
    ]


def refusal(format: str, row: dict[str, Any], template: str | None = CHATML) -> str:
    with pytest.raises(RLHFError) as caught:
        read(format, row, template)
    return str(caught.value).removeprefix("rows.jsonl line 1: ")


NULLS = {"name": None, "reasoning_content": None, "tool_calls": None, "function_call": None}


@pytest.mark.parametrize("template", [CHATML, NAMED, STRICT_CALLS, TOOLS])
@pytest.mark.parametrize("extra", [NULLS, {"tool_calls": []}, {"tool_calls": {}}])
def test_a_null_key_is_no_key_and_no_calls_are_none(extra: Any, template: str) -> None:
    row = {"messages": [{**message, **extra} for message in TALK]}
    assert texts("demonstration", row, template) == texts(
        "demonstration", {"messages": TALK}, template
    )


CALL = {"name": "weather", "arguments": {"city": "Oslo", "days": [1, None]}}
WRITTEN = '{"city": "Oslo", "days": [1, null]}'
"""The arguments as JSON text, as OpenAI writes them."""


def talk_with(call: dict[str, Any]) -> dict[str, Any]:
    result = {"role": "tool", "content": "rain"}
    return {"messages": [USER, {"role": "assistant", **call}, result, GOOD]}


CALLS: dict[str, dict[str, Any]] = {
    "text": {"content": None, "tool_calls": [{"function": {**CALL, "arguments": WRITTEN}}]},
    "an object": {"tool_calls": [{"id": None, "type": "function", "function": CALL}]},
    "no list": {"tool_calls": {"function": CALL}},
    "another order": {"tool_calls": [{"function": {"arguments": WRITTEN, "name": "weather"}}]},
    "JSON text": {"tool_calls": json.dumps([{"function": CALL}])},
    "no function": {"tool_calls": [{**CALL, "arguments": WRITTEN}]},
    "OpenAI's older form": {"content": None, "function_call": {**CALL, "arguments": WRITTEN}},
    "a role of ms-swift": {"role": "tool_call", "content": json.dumps(CALL)},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("{{ f | tojson }}", json.dumps(CALL)),
        ("{% for k, v in f.arguments | items %}{{ k }}={{ v | tojson }};{% endfor %}",
         'city="Oslo";days=[1, null];'),
        ("{{ f.arguments if f.arguments is string else f.arguments | tojson }}", WRITTEN),
        ("{{ '' + f.arguments }}", WRITTEN),  # Refuses an object.
        ("{{ f.arguments }}", WRITTEN),  # Prints an object as Python does.
    ],
)  # fmt: skip
def test_arguments_of_a_call_are_an_object_unless_the_template_wants_text(
    name: str, expression: str, expected: str
) -> None:
    written = "".join(texts("demonstration", talk_with(CALLS[name]), calls_as(expression)))
    assert f"weather {expected}<|im_end|>" in written


@pytest.mark.parametrize("arguments", [None, "", " ", {}, "{}"])
def test_a_call_without_arguments_has_an_object_without_keys(arguments: Any) -> None:
    calls = [{"function": {"name": "now", "arguments": arguments}}]
    row = talk_with({"tool_calls": calls})
    written = "".join(texts("demonstration", row, calls_as("{{ f.arguments | tojson }}")))
    assert "now {}<|im_end|>" in written


def test_results_of_openais_older_calls_are_of_the_role_tool() -> None:
    row = talk_with({"function_call": CALL})
    row["messages"][2] = {"role": "function", "name": "weather", "content": "rain"}
    assert "<|im_start|>tool\nrain<|im_end|>" in "".join(
        texts("demonstration", row, calls_as("{{ f | tojson }}"))
    )


PAIR = {"prompt": [SYSTEM, USER], "chosen": [GOOD], "rejected": [BAD]}
EARLIER = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "yes"}]
LONG = {"prompt": [*EARLIER, USER], "chosen": [GOOD], "rejected": [BAD]}
TWICE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the system message in the prompt only": (
        {"prompt": [SYSTEM, USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, PAIR,
    ),
    "the system message in the answers only": (
        {"prompt": [USER], "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}, PAIR,
    ),
    "the system message in one answer only": (
        {"prompt": [USER], "chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]}, PAIR,
    ),
    "the system message in one answer and no prompt": (
        {"chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]}, PAIR,
    ),
    "a system column": (
        {"system": "be kind", "prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        PAIR,
    ),
    "a system column and text": (
        {"system": "be kind", "prompt": "What is two?", "chosen": "one and one",
         "rejected": "yes, no"},
        PAIR,
    ),
    "a system column and no prompt": (
        {"system": "be kind", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, PAIR,
    ),
    "a blank": (
        {"prompt": [SYSTEM, {**USER, "content": "What is two? "}], "chosen": [USER, GOOD],
         "rejected": [USER, BAD]},
        PAIR,
    ),
    "a null key": (
        {"prompt": [SYSTEM, {**USER, "name": None}], "chosen": [USER, GOOD],
         "rejected": [USER, BAD]},
        PAIR,
    ),
    "a weight": (
        {"prompt": [SYSTEM, USER], "chosen": [{**USER, "weight": 0}, GOOD],
         "rejected": [USER, BAD]},
        PAIR,
    ),
    "parts": (
        {"prompt": [SYSTEM, USER], "rejected": [USER, BAD],
         "chosen": [{**USER, "content": [{"type": "text", "text": "What is two?"}]}, GOOD]},
        PAIR,
    ),
    "one answer only": ({**PAIR, "chosen": [USER, GOOD]}, PAIR),
    "a text prompt that is the last turn": (
        {"prompt": "What is two?", "chosen": [*EARLIER, USER, GOOD],
         "rejected": [*EARLIER, USER, BAD]},
        LONG,
    ),
    "the last turn of the prompt": (
        {"prompt": [*EARLIER, USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, LONG,
    ),
    "a text prompt after the first difference": (
        {"prompt": "What is two?", "chosen": [EARLIER[0], GOOD, USER, GOOD],
         "rejected": [EARLIER[0], BAD, USER, GOOD]},
        {"chosen": [EARLIER[0], GOOD, USER, GOOD], "rejected": [EARLIER[0], BAD, USER, GOOD]},
    ),
    "text that both answers begin with": (
        {"prompt": "What is two? ", "chosen": "What is two? one", "rejected": "What is two? no"},
        {"prompt": "What is two? ", "chosen": "one", "rejected": "no"},
    ),
    "text whose blanks differ": (
        {"prompt": "What is two?\n", "chosen": "What is two? one", "rejected": " What is two? no"},
        {"prompt": "What is two?\n", "chosen": " one", "rejected": " no"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("format", ["preference", "unpaired"])
@pytest.mark.parametrize("name", TWICE)
def test_a_prompt_in_two_columns_is_rendered_once(name: str, format: str) -> None:
    row, once = TWICE[name]
    assert texts(format, row) == texts(format, once)


def test_the_prompt_of_a_completion_and_of_ranked_answers_is_rendered_once() -> None:
    once = {"prompt": [SYSTEM, USER], "completion": [GOOD]}
    for completion in ([USER, GOOD], [SYSTEM, USER, GOOD]):
        row = {"prompt": [USER], "system": "be kind", "completion": completion}
        assert texts("demonstration", row) == texts("demonstration", once)
        assert texts("unpaired", {**row, "label": True}) == texts(
            "unpaired", {**once, "label": True}
        )
    ranked = {"prompt": [USER], "answers": [[USER, GOOD], [BAD]], "scores": [2, 1]}
    assert texts("preference", ranked) == texts("preference", {**PAIR, "prompt": [USER]})


def test_one_word_that_begins_both_answers_is_no_repeated_prompt() -> None:
    row = {"prompt": "hello", "chosen": "hello there", "rejected": "hello"}
    assert texts("preference", row)[0] == "hello"
    assert texts("preference", row)[1].startswith("hello there")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "hello there", "chosen": TALK, "rejected": [USER, BAD]},
            "`prompt` ends with a turn of the user and `chosen` begins with another one; remove "
            "one of them, or rename `prompt` with `columns` in data",
        ),
        (
            {"chosen": [SYSTEM, *TALK], "rejected": [{**SYSTEM, "content": "be"}, USER, BAD]},
            "the system messages of `chosen` and `rejected` differ; use the same one",
        ),
        (
            {"system": "be", "prompt": [SYSTEM, USER], "chosen": [GOOD], "rejected": [BAD]},
            "`system` differs from the system message of `prompt`; remove one of them",
        ),
        (
            {"system": "be", "chosen": "say one", "rejected": "say two"},
            "`system` cannot be used beside text in `chosen`; write the row as messages, or remove "
            "`system`",
        ),
    ],
)
def test_context_that_contradicts_itself_is_an_error(row: dict[str, Any], message: str) -> None:
    assert refusal("preference", row) == message


WITH_SYSTEM: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("demonstration", {"messages": TALK}, {"messages": [SYSTEM, *TALK]}),
    (
        "demonstration",
        {"prompt": "What is two?", "completion": "one and one"},
        {"messages": [SYSTEM, *TALK]},
    ),
    (
        "demonstration",
        {"instruction": "What is two?", "output": "one and one"},
        {"messages": [SYSTEM, *TALK]},
    ),
    (
        "unpaired",
        {"prompt": "What is two?", "completion": "one", "label": True},
        {"prompt": [SYSTEM, USER], "completion": "one", "label": True},
    ),
]


@pytest.mark.parametrize(("format", "row", "expected"), WITH_SYSTEM)
def test_a_system_text_beside_any_row_is_its_system_message(
    format: str, row: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert texts(format, {**row, "system": "be kind"}) == texts(format, expected)
    for blank in (None, "", " \n"):
        assert texts(format, {**row, "system": blank}) == texts(format, row)


@pytest.mark.parametrize("column", ["system", "tools"])
def test_what_plain_text_cannot_hold_is_an_error(column: str) -> None:
    value = "be kind" if column == "system" else [{"name": "add"}]
    assert refusal("demonstration", {"text": "say", column: value}) == (
        f"`{column}` cannot be used beside text in `text`; write the row as messages, or remove "
        f"`{column}`"
    )
    row = {"prompt": "say", "completion": "one", column: value}
    assert refusal("demonstration", row, None) == (
        "this is a conversation, but the tokenizer has no chat template; set data.chat_template "
        "to a file or to chatml"
    )


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


@pytest.mark.parametrize(
    "columns",
    [
        {"tools": [TOOL]},
        {"tools": json.dumps([TOOL])},
        {"tools": [json.dumps(TOOL)]},
        {"functions": [TOOL["function"]]},
    ],
)
def test_tools_in_any_spelling_reach_the_template(columns: dict[str, Any]) -> None:
    for row in ({"messages": TALK}, {"prompt": "What is two?", "completion": "one and one"}):
        written = "".join(texts("demonstration", {**row, **columns}, TOOLS))
        assert f"[TOOLS]{json.dumps([TOOL])}[/TOOLS]" in written


def test_a_blank_system_message_is_left_out_if_the_template_refuses_it() -> None:
    blank = {"role": "system", "content": ""}
    plain = texts("demonstration", {"messages": TALK}, GEMMA)
    assert texts("demonstration", {"messages": [blank, *TALK]}, GEMMA) == plain
    kept = "".join(texts("demonstration", {"messages": [blank, *TALK]}, DEFAULT_SYSTEM))
    assert kept.startswith("<|im_start|>system\n<|im_end|>\n")


def test_a_blank_system_message_of_sharegpt_is_none() -> None:
    talk = [
        {"from": "system", "value": ""},
        {"from": "human", "value": "What is two?"},
        {"from": "gpt", "value": "one and one"},
    ]
    for template in (GEMMA, DEFAULT_SYSTEM):
        assert texts("demonstration", {"conversations": talk}, template) == texts(
            "demonstration", {"messages": TALK}, template
        )


def reason(medium: str) -> str:
    images = "only rows that a row format reads may have images"
    return images if "image" in medium else "models are trained on text and images only"


@pytest.mark.parametrize("medium", ["image", "images", "video", "videos", "audio", "audios"])
def test_a_row_with_media_is_an_error_unless_they_are_empty(medium: str) -> None:
    for value in (["a.png"], "a.png", {"bytes": None, "path": "a.png"}):
        assert refusal("demonstration", {"messages": TALK, medium: value}) == (
            f"the row has `{medium}`, but {reason(medium)}; remove the column or the row"
        )
    for empty in (None, [], ""):
        assert read("demonstration", {"messages": TALK, medium: empty})


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "input_audio", "input_audio": {}},
        {"video": "a.mp4", "text": None},
    ],
)
def test_a_part_that_is_no_text_is_an_error_even_if_the_template_prints_it(part: Any) -> None:
    template = CHATML.replace("m['content'] +", "m['content'] | tojson +")
    kind = part.get("type") or "video"
    row = {"messages": [{**USER, "content": [part]}, GOOD]}
    assert refusal("demonstration", row, template) == (
        f"`content` of message 0 of `messages` has a part of type '{kind}', but {reason(kind)}; "
        "remove the row"
    )


NO_IMAGE = "for which the row has no image; add the image, remove the row"
NO_MEDIA = "but models are trained on text and images only; remove the row"


@pytest.mark.parametrize(
    ("text", "shown", "reason"),
    [
        ("<image>What is this?", "<image>", NO_IMAGE),
        ("What is this?\n<video>\n", "<video>", NO_MEDIA),
        ("Listen: <audio>", "<audio>", NO_MEDIA),
        ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|>", NO_IMAGE),
    ],
)
def test_a_placeholder_of_media_is_an_error(text: str, shown: str, reason: str) -> None:
    end = f"has the placeholder {shown}, {reason}, or set data.bad_images to drop"
    for content in (text, ["See.", text], [{"type": "text", "text": text}]):
        row: dict[str, Any] = {"messages": [{**USER, "content": content}, GOOD]}
        assert refusal("demonstration", row) == f"message 0 of `messages` {end}"
    row = {"prompt": text, "completion": "one"}
    assert refusal("demonstration", row) == f"`prompt` {end}"


@pytest.mark.parametrize(
    "text", ["Use the <image> element here.", "<video>\n<source>\n</video>", "a < b > c"]
)
def test_markup_is_no_placeholder(text: str) -> None:
    assert read("demonstration", {"messages": [{**USER, "content": text}, GOOD]})
    assert read("demonstration", {"messages": [USER, {**GOOD, "content": "<image>" + text}]})


@pytest.mark.parametrize(
    "history", [[{"role": "user", "content": "hi"}], "none", [["q"]], [["q", 5]], [["q", "a", "b"]]]
)
def test_a_history_that_is_not_pairs_of_texts_is_an_error(history: Any) -> None:
    row = {"instruction": "What is two?", "output": "one", "history": history}
    assert refusal("demonstration", row) == (
        "`history` must be a list of pairs of texts, [[question, answer], ...]"
    )


@pytest.mark.parametrize(
    ("format", "row", "message"),
    [
        ("demonstration", {"instruction": 5, "output": "4"}, "`instruction` must be text, not int"),
        (
            "demonstration",
            {"instruction": "say", "input": ["a"], "output": "4"},
            "`input` must be text, not a list",
        ),
        (
            "demonstration",
            {"instruction": "say", "output": 4},
            "`output` must be text, not int",
        ),
        (
            "demonstration",
            {"conversations": [{"from": ["human"], "value": "x"}]},
            'message 0 of `messages` has no `role`: {"from": ["human"], "value": "x"}',
        ),
        (
            "demonstration",
            {"conversations": [{"from": "human", "value": 5}]},
            "`value` of message 0 of `messages` must be text or a list of parts, not int",
        ),
        ("demonstration", {"text": "say", "system": ["be"]}, "`system` must be text, not a list"),
        (
            "demonstration",
            {"messages": [USER, {"role": "assistant", "tool_calls": "add(2)"}]},
            "`tool_calls` of message 1 of `messages` must be a list of calls, not 'add(2)'",
        ),
        (
            "preference",
            {"prompt": "say", "chosen": "4", "rejected": "5", "margin": 10**400},
            "`margin` must hold numbers up to 1.8e308, not larger ones",
        ),
        (
            "preference",
            {"prompt": "say", "answers": ["4", "5"], "scores": [1, 10**400]},
            "`scores` must hold numbers up to 1.8e308, not larger ones",
        ),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_an_error(
    format: str, row: dict[str, Any], message: str
) -> None:
    assert refusal(format, row) == message


@pytest.mark.parametrize("role", ["model", "Assistant", "gpt", "bot", "AI", " assistant "])
def test_roles_of_other_projects_are_understood(role: str) -> None:
    row = {"messages": [{**USER, "role": "Human"}, {**GOOD, "role": role}]}
    assert texts("demonstration", row) == texts("demonstration", {"messages": TALK})
    pair = {"prompt": [USER], "chosen": [{**GOOD, "role": role}], "rejected": [BAD]}
    assert texts("preference", pair) == texts("preference", {**PAIR, "prompt": [USER]})


@pytest.mark.parametrize(
    ("format", "row", "name"),
    [
        ("demonstration", {"messages": [USER, {**GOOD, "role": "narrator"}]}, "messages"),
        ("demonstration", {"prompt": "x", "completion": [{**GOOD, "role": "narrator"}]},
         "completion"),
        ("preference", {"prompt": "x", "chosen": [{**GOOD, "role": "narrator"}], "rejected": "y"},
         "chosen"),
    ],
)  # fmt: skip
def test_a_role_that_nobody_knows_is_named(format: str, row: dict[str, Any], name: str) -> None:
    assert refusal(format, row) == (
        f"`{name}` has no turn of the assistant, but the role 'narrator'; write assistant"
    )


def test_a_conversation_as_json_text_is_a_conversation() -> None:
    for name, row in (("messages", {"messages": TALK}), ("conversations", {"messages": TALK})):
        assert texts("demonstration", {name: json.dumps(TALK)}) == texts("demonstration", row)
    pair = {name: json.dumps(value) for name, value in PAIR.items()}
    assert texts("preference", pair) == texts("preference", PAIR)
    ranked = {"prompt": "say it", "answers": '["one", "two"]', "ranks": "[2, 1]"}
    assert [row.columns["ranks"] for row in read("preference", ranked)] == [[2.0, 1.0]]
    # Any other text in brackets is text.
    assert texts("demonstration", {"prompt": "[1]", "completion": '["a"]'})[0] == "[1]"
