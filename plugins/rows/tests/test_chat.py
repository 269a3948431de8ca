"""Conversations as token ids: chat templates of many styles, with and without generation marks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_templates import (
    CHATML,
    LAST,
    LLAMA3,
    QUESTION,
    QWEN3,
    REPLY,
    TALK,
    TEMPLATES,
    TOOLS,
    adding_bos,
    read,
    tokenizer_of,
)
from read_rows import read_rows
from transformers import PreTrainedTokenizerFast

from rlhf.errors import RLHFError
from rlhf_rows import Reader, Rendered, Row, encode
from rlhf_rows.chat import ChatTemplate
from rlhf_rows.encoder import Encoder

THINKING = {
    "Qwen 3": ("", "<think>\n\n</think>\n\n"),
    "GLM 4.5": ("\n", "<think></think>\n"),
    "Nemotron": ("", "<think></think>"),
    "SmolLM 3": ("", "<think>\n\n</think>\n"),
    "Magistral": ("", "[THINK][/THINK]"),
}
"""By family: what its template writes before an answer, and its block of reasoning without any."""


def trained_texts(tokenizer: Any, row: Row) -> list[str]:
    """The text of each run of trained tokens."""
    (answer,) = row.answers
    mask = answer.trained or [True] * len(answer.tokens)
    runs: list[str] = []
    run: list[int] = []
    for token, trained in [*zip(answer.tokens, mask, strict=True), (-1, False)]:
        if trained:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


def whole_text(tokenizer: Any, row: Row) -> str:
    return tokenizer.decode([*row.prompt, *row.answers[0].tokens])


@pytest.mark.parametrize("kind", ["bytes", "blank"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_exactly_the_last_answer_and_its_end_are_trained_on(name: str, kind: str) -> None:
    template, expected = TEMPLATES[name]
    tokenizer = tokenizer_of(kind, template)
    (row,) = read(tokenizer, messages=TALK[:2])
    (text,) = trained_texts(tokenizer, row)
    assert text == expected.format(REPLY)
    # The prompt has the same ids that it has when the model generates an answer.
    opened = tokenizer.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
    if name not in ("r1",):
        opened += "<think>\n\n</think>\n\n" if name == "qwen 3" else ""
        ids = tokenizer(opened, add_special_tokens=False)["input_ids"]
        assert row.prompt == ids


@pytest.mark.parametrize("style", THINKING)
def test_an_empty_block_of_reasoning_is_trained_on_only_if_the_row_writes_it(style: str) -> None:
    before, block = THINKING[style]
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}{% else %}"
        "{{ '<|Assistant|>" + before + "' }}{% if '</' not in m.content and '[/' not in m.content "
        "%}{{ '" + block + "' }}{% endif %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
    )
    tokenizer = tokenizer_of("bytes", template)
    (row,) = read(tokenizer, messages=TALK[:2])
    assert trained_texts(tokenizer, row) == [REPLY + "</s>"]
    assert tokenizer.decode(row.prompt) == f"<|User|>{QUESTION}<|Assistant|>{before}{block}"
    (row,) = read(tokenizer, messages=[TALK[0], {**TALK[1], "content": block + REPLY}])
    assert trained_texts(tokenizer, row) == [before + block + REPLY + "</s>"]


def test_a_pair_with_and_without_reasoning_shares_its_prompt() -> None:
    tokenizer = tokenizer_of("bytes", QWEN3)
    thought = "<think>\none\n</think>\n\n" + REPLY
    raw = {
        "prompt": TALK[:1],
        "chosen": [{**TALK[1], "content": thought}],
        "rejected": TALK[1:2],
    }
    ((row,),) = read_rows("preference", [("rows.jsonl line 1", raw)], Reader(tokenizer))
    chosen, rejected = row.answers
    assert tokenizer.decode(row.prompt).endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(chosen.tokens) == thought + "<|im_end|>"
    assert chosen.trained is None
    pairs = zip(rejected.tokens, rejected.trained, strict=True)
    assert tokenizer.decode([token for token, trained in pairs if trained]) == REPLY + "<|im_end|>"


@pytest.mark.parametrize("kind", ["bytes", "blank"])
@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {"qwen 3"}))
def test_every_answer_of_a_conversation_is_trained_on_and_no_question(name: str, kind: str) -> None:
    template, expected = TEMPLATES[name]
    tokenizer = tokenizer_of(kind, template)
    (row,) = read(tokenizer, messages=TALK)
    texts = trained_texts(tokenizer, row)
    assert texts == [expected.format(REPLY), expected.format(LAST)]
    # A tokenizer that puts a blank before every text shows it after every special token.
    rendered = tokenizer.apply_chat_template(TALK, tokenize=False).replace(" ", "")
    assert rendered.startswith(whole_text(tokenizer, row).replace(" ", ""))


def test_a_template_that_drops_earlier_reasoning_splits_the_conversation() -> None:
    tokenizer = tokenizer_of("bytes", QWEN3)
    first = "<think>\nis it one?\n</think>\n\n" + REPLY
    last = "<think>\nis it two?\n</think>\n\n" + LAST
    messages = [TALK[0], {**TALK[1], "content": first}, TALK[2], {**TALK[3], "content": last}]
    one, two = read(tokenizer, messages=messages)
    assert trained_texts(tokenizer, one) == [first + "<|im_end|>"]
    assert trained_texts(tokenizer, two) == [last + "<|im_end|>"]
    assert "is it one?" not in whole_text(tokenizer, two)
    assert REPLY in whole_text(tokenizer, two)


def test_a_template_with_marks_that_drops_earlier_reasoning_splits_the_conversation() -> None:
    marked = QWEN3.replace(
        "{% if loop.index0 > ns.last %}", "{% generation %}{% if loop.index0 > ns.last %}"
    ).replace(
        "{{ content + '<|im_end|>\n' }}",
        "{{ content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}",
    )
    tokenizer = tokenizer_of("bytes", marked)
    first = "<think>\nis it one?\n</think>\n\n" + REPLY
    one, two = read(tokenizer, messages=[TALK[0], {**TALK[1], "content": first}, *TALK[2:]])
    assert trained_texts(tokenizer, one) == [first + "<|im_end|>"]
    # Marks say exactly what is trained on.
    assert trained_texts(tokenizer, two) == ["<think>\n\n</think>\n\n" + LAST + "<|im_end|>"]


def test_messages_after_the_last_answer_are_not_read() -> None:
    tokenizer = tokenizer_of("bytes", CHATML)
    (row,), (shorter,) = (read(tokenizer, messages=TALK[:end]) for end in (3, 2))
    assert whole_text(tokenizer, row) == whole_text(tokenizer, shorter)
    assert read(tokenizer, messages=TALK[:1]) == []


def test_a_question_that_looks_like_an_answer_is_not_trained_on() -> None:
    tokenizer = tokenizer_of("bytes", CHATML)
    trap = "say<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    (row,) = read(tokenizer, messages=[{"role": "user", "content": trap}, TALK[1]])
    assert trained_texts(tokenizer, row) == [REPLY + "<|im_end|>"]


def test_tools_and_tool_calls_are_where_the_template_puts_them() -> None:
    tokenizer = tokenizer_of("bytes", TOOLS)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}]
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "add", "arguments": {"a": 2}}],
    }
    result = {"role": "tool", "content": "4"}
    messages = [TALK[0], call, result, TALK[3]]
    rows = read(tokenizer, messages=messages, tools=json.dumps(tools))
    # The template names the tools only before the last question, so the two turns have two
    # contexts.
    one, two = rows
    (call_text,) = trained_texts(tokenizer, one)
    assert call_text.startswith("<tool_call>")
    assert call_text.endswith("</tool_call><|im_end|>")
    assert "[TOOLS]" in whole_text(tokenizer, one)
    assert trained_texts(tokenizer, two) == [LAST + "<|im_end|>"]


def test_only_the_completion_of_a_prompt_is_trained_on() -> None:
    tokenizer = tokenizer_of("bytes", CHATML)
    (row,) = read(tokenizer, prompt=TALK[:3], completion=TALK[3:])
    assert trained_texts(tokenizer, row) == [LAST + "<|im_end|>"]
    (mixed,) = read(tokenizer, prompt=QUESTION, completion=TALK[1:2])
    assert trained_texts(tokenizer, mixed) == [REPLY + "<|im_end|>"]


@pytest.mark.parametrize("kind", ["bytes", "blank"])
def test_text_prompts_keep_their_own_ids_and_completions_end_with_eos(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    (row,) = read(tokenizer, prompt="What is two and", completion=" two? yes")
    assert row.prompt == tokenizer("What is two and")["input_ids"]
    assert trained_texts(tokenizer, row) == [" two? yes</s>"]
    (glued,) = read(tokenizer, prompt="What is tw", completion="o?")
    assert glued.prompt == tokenizer("What is tw")["input_ids"]
    assert trained_texts(tokenizer, glued) == ["o?</s>"]


@pytest.mark.parametrize("kind", ["bytes", "blank"])
def test_rows_that_must_be_tokenised_in_parts_take_a_fixed_number_of_calls(kind: str) -> None:
    class Counting(PreTrainedTokenizerFast):
        calls = 0

        def __call__(self, *texts: Any, **keywords: Any) -> Any:
            type(self).calls += 1
            return super().__call__(*texts, **keywords)

    backend = tokenizer_of(kind).backend_tokenizer
    tokenizer = Counting(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    # The span ends within a word.
    texts = [Rendered(f"What is two and {number}", ((0, 10),)) for number in range(29)]
    calls = []
    for count in (1, 29):
        encoder = Encoder(tokenizer)
        Counting.calls = 0
        encoder.encode(texts[:count])
        calls.append(Counting.calls)
    assert calls[0] == calls[1] > 1


def test_text_is_trained_on_whole_with_one_eos() -> None:
    tokenizer = tokenizer_of("bytes")
    for text in ("What is two?", "What is two?</s>"):
        (row,) = read(tokenizer, text=text)
        assert row.prompt == []
        assert trained_texts(tokenizer, row) == ["What is two?</s>"]
    assert read(tokenizer, text="") == []


@pytest.mark.parametrize("kind", ["bytes", "blank"])
def test_settings_that_a_caller_left_on_the_tokenizer_do_not_change_ids(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    tokenizer.pad_token = "<unk>"
    reader = Reader(tokenizer)
    raw = [("rows.jsonl line 1", {"prompt": "What is", "completion": " two?</s> yes"})]
    ((before,),) = read_rows("demonstration", raw, reader)
    tokenizer(["two", "What is two?"], truncation=True, max_length=2, padding=True)
    tokenizer("</s>", split_special_tokens=True)
    assert read_rows("demonstration", raw, reader) == [[before]]
    assert before.answers[0].tokens.count(tokenizer.eos_token_id) == 2


def test_a_tokenizer_with_code_of_its_own_is_called_and_not_its_backend() -> None:
    class Lower(PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, **keywords: Any) -> Any:
            lower = text.lower() if isinstance(text, str) else [each.lower() for each in text]
            return super()._encode_plus(lower, **keywords)

    backend = tokenizer_of("bytes").backend_tokenizer
    tokenizer = Lower(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    (row,) = read(tokenizer, prompt="What is", completion=" TWO")
    assert tokenizer.decode([*row.prompt, *row.answers[0].tokens]) == "what is two</s>"


def test_exactly_one_bos_is_added_if_the_tokenizer_adds_it() -> None:
    tokenizer = adding_bos(LLAMA3)
    for columns in ({"text": "two"}, {"prompt": "one", "completion": "two"}, {"messages": TALK}):
        (row,) = read(tokenizer, **columns)
        ids = [*row.prompt, *row.answers[0].tokens]
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1
    (row,) = read(tokenizer, text="two")
    assert row.prompt == [tokenizer.bos_token_id]


def test_a_conversation_has_only_the_bos_that_its_template_writes() -> None:
    tokenizer = adding_bos(CHATML)
    (row,) = read(tokenizer, messages=TALK)
    whole = tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=False)
    ids = [*row.prompt, *row.answers[0].tokens]
    assert ids == whole[: len(ids)]
    assert tokenizer.bos_token_id not in ids
    (row,) = read(tokenizer, prompt="one", completion="two")
    assert row.prompt[0] == tokenizer.bos_token_id


def test_text_after_the_last_turn_is_kept_on_request() -> None:
    tokenizer = tokenizer_of("bytes", CHATML)
    raw = [("rows.jsonl line 1", {"messages": TALK})]
    ((cut,),) = read_rows("demonstration", raw, Reader(tokenizer))
    ((whole,),) = read_rows("demonstration", raw, Reader(tokenizer, whole=True))
    assert whole.prompt == cut.prompt
    (short,), (long,) = cut.answers, whole.answers
    assert tokenizer.decode(long.tokens[len(short.tokens) :]) == "\n"
    assert long.tokens[: len(short.tokens)] == short.tokens
    assert sum(long.trained) == (len(short.tokens) if short.trained is None else sum(short.trained))
    assert not long.trained[-1]


@pytest.mark.parametrize("name", ["weight", "train", "loss"])
@pytest.mark.parametrize("foreign", [False, True])
def test_turns_that_a_row_excludes_are_not_trained_on(name: str, foreign: bool) -> None:
    tokenizer = tokenizer_of("bytes", CHATML)
    no, yes = (0, 1) if name == "weight" else (False, True)
    talk = [TALK[0], {**TALK[1], name: no}, {**TALK[2], name: None}, {**TALK[3], name: yes}]
    columns: dict[str, Any] = {"messages": talk}
    if foreign:
        there = {"user": "human", "assistant": "gpt"}
        columns = {
            "conversations": [
                {"from": there[it["role"]], "value": it["content"], name: it.get(name)}
                for it in talk
            ]
        }
    (row,) = read(tokenizer, **columns)
    assert trained_texts(tokenizer, row) == [LAST + "<|im_end|>"]
    assert REPLY in whole_text(tokenizer, row)
    assert read(tokenizer, messages=[TALK[0], {**TALK[1], name: no}]) == []


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({**TALK[1], "weight": 0.5}, "`weight` of message 1 (role assistant) is 0.5; use 0 or 1"),
        ({**TALK[2], "train": True}, "`train` of message 1 (role user) is True, but only turns of"),
    ],
)
def test_a_choice_of_turns_that_is_not_possible_is_refused(message: Any, problem: str) -> None:
    with pytest.raises(RLHFError, match=re.escape(problem)):
        read(tokenizer_of("bytes", CHATML), messages=[TALK[0], message, TALK[3]])


OPEN_ENDED = (
    "{% for message in messages %}{{ message.role | capitalize + ': ' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
"""A template whose generation prompt ends within a token of what it renders."""


@pytest.mark.parametrize("kind", ["bytes", "blank"])
def test_a_text_that_is_read_whole_has_the_tokens_of_its_rendering(kind: str) -> None:
    tokenizer = tokenizer_of(kind, OPEN_ENDED)
    answers = [[{"role": "assistant", "content": text}] for text in ("two and two", "think so")]
    cut, whole = (
        encode(tokenizer, TALK[:1], *answers, renders_whole=whole) for whole in (False, True)
    )
    assert tokenizer.decode(cut.prompt).lstrip() == "User: What is two?\nAssistant: "
    for answer, one, other in zip(answers, cut.answers, whole.answers, strict=True):
        rendered = tokenizer.apply_chat_template(
            [*TALK[:1], *answer], tokenize=True, return_dict=False
        )
        assert [*whole.prompt, *other.tokens] == rendered
        assert [*cut.prompt, *one.tokens] != rendered[: len(cut.prompt) + len(one.tokens)]
        assert one.trained is None
        # The first token begins before the answer.
        assert other.trained is not None
        assert other.trained[:2] == [False, True]
        assert tokenizer.decode(other.tokens[other.trained.count(True) + 1 :]).strip() == ""


@pytest.mark.parametrize("kind", ["bytes", "blank"])
def test_plain_text_that_is_read_whole_has_the_tokens_of_the_tokenizer(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    row = encode(tokenizer, "What is ", "two?", "", renders_whole=True)
    for answer, text in zip(row.answers, ("What is two?", "What is "), strict=True):
        ids = tokenizer(text)["input_ids"]
        assert [*row.prompt, *answer.tokens] == [*ids, tokenizer.eos_token_id]


SHARED = Path(__file__).parents[4] / "shared" / "data"


@pytest.mark.skipif(not SHARED.exists(), reason="the shared rows are not here")
def test_real_conversations_are_trained_on_exactly() -> None:
    lines = (SHARED / "sft" / "gsm8k.eval.jsonl").read_text().splitlines()[:50]
    for name, (template, expected) in TEMPLATES.items():
        tokenizer = tokenizer_of("bytes", template)
        for line in lines:
            messages = json.loads(line)["messages"]
            (row,) = read(tokenizer, messages=messages)
            (text,) = trained_texts(tokenizer, row)
            content = messages[-1]["content"]
            content = content.strip() if name in ("llama 3", "gemma") else content
            assert text.endswith(expected.format(content))


TEXT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = "m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join"


def test_a_template_that_renders_only_parts_gets_text_as_a_part() -> None:
    talk = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    texts = []
    for content in ("m.content", PARTS):
        chat = ChatTemplate(tokenizer_of("bytes", TEXT.replace("CONTENT", content)))
        texts.append(chat.render(talk, first=0, tools=None, keywords={}))
        assert chat.prompt(talk[:1], tools=None, keywords={}).endswith(
            "one<|im_end|>\n<|im_start|>assistant\n"
        )
    assert texts[0] == texts[1]
