"""Where the assistant's turns stand: chat templates of many styles, with and without generation
marks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf.data.formats import RawRow, Reader, Row, demonstrations
from rlhf.errors import RLHFError
from rlhf.model import load

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
    "'<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == "
    "'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ "
    "m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)
CONTENT_MARKED = CHATML_MARKED.replace(
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}",
    "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' "
    "}}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + "
    "m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}{% endfor %}"
)
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set "
    "ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set content = m.content %}{% set reason = m.reasoning_content or '' %}"
    "{% if '</think>' in content %}{% set reason = "
    "content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last %}"
    "{{ '<think>\n' + reason + '\n</think>\n\n' }}{% endif %}{{ content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif "
    "%}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role "
    "not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|User|>' + "
    "m['content'] }}{% else %}"
    "{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] | capitalize + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
TOOLS = (
    "{% for m in messages %}{% if loop.last or loop.index0 == messages|length - 2 %}{% if "
    "tools and m.role == 'user' %}"
    "{{ '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{% endif %}{% endif %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{{ '<|im_start|>assistant\n<tool_call>' "
    "+ m.tool_calls | tojson + "
    "'</tool_call><|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
    "'<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% "
    "endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, "{}<|im_end|>"),
    "chatml marked": (CHATML_MARKED, "{}<|im_end|>"),
    "marks without the end": (CONTENT_MARKED, "{}<|im_end|>"),
    "llama 3": (LLAMA3, "{}<|eot_id|>"),
    "mistral": (MISTRAL, " {}</s>"),
    "qwen 3": (QWEN3, "{}<|im_end|>"),
    "gemma": (GEMMA, "{}<end_of_turn>"),
    "r1": (R1, "{}</s>"),
    "plain": (PLAIN, "{}\n"),
}
SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>",
]  # fmt: skip
CORPUS = [
    "What is two and two? The answer is four.\n\nUser: hello there\nAssistant: I think so. "
    "yes, no.\nassistant\n"
] * 4
QUESTION, REPLY, SECOND, LAST = (
    "What is two?",
    "Assistant: one and one",
    "user: and four?",
    "two. two",
)
TALK = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": REPLY},
    {"role": "user", "content": SECOND},
    {"role": "assistant", "content": LAST},
]


def tokenizer_of(kind: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """A small real tokenizer: `bytes` as in GPT-2 and Llama 3, `blank` with a blank before every
    text as in Llama 2."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=kind == "blank"))
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        alphabet = [*map(chr, range(33, 127)), "\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=["<unk>", *SPECIAL],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=template,
    )


def read(tokenizer: Any, **columns: Any) -> list[Row]:
    (rows,) = demonstrations([RawRow("rows.jsonl line 1", columns)], Reader(tokenizer))
    return rows


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
    thinking = "<think>\n\n</think>\n\n" if name == "qwen 3" else ""
    assert text == thinking + expected.format(REPLY)
    # The prompt has the very ids that it has when the model is asked to answer.
    opened = tokenizer.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
    if name not in ("r1",):
        ids = tokenizer(opened, add_special_tokens=False)["input_ids"]
        assert row.prompt == ids


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


def test_tools_and_tool_calls_stand_where_the_template_puts_them() -> None:
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
    # The template names the tools before the last question alone, so the two turns have two
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
    raw = [RawRow("rows.jsonl line 1", {"prompt": "What is", "completion": " two?</s> yes"})]
    ((before,),) = demonstrations(raw, reader)
    tokenizer(["two", "What is two?"], truncation=True, max_length=2, padding=True)
    tokenizer("</s>", split_special_tokens=True)
    assert demonstrations(raw, reader) == [[before]]
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


def adding_bos(template: str) -> Any:
    """A tokenizer that puts `<s>` before what it is given."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizer_of("bytes", template)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_there_is_exactly_one_bos_where_the_tokenizer_adds_one() -> None:
    tokenizer = adding_bos(LLAMA3)
    for columns in ({"text": "two"}, {"prompt": "one", "completion": "two"}, {"messages": TALK}):
        (row,) = read(tokenizer, **columns)
        ids = [*row.prompt, *row.answers[0].tokens]
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1
    (row,) = read(tokenizer, text="two")
    assert row.prompt == [tokenizer.bos_token_id]


def test_a_conversation_has_what_its_template_writes_and_no_bos_beside() -> None:
    tokenizer = adding_bos(CHATML)
    (row,) = read(tokenizer, messages=TALK)
    whole = tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=False)
    ids = [*row.prompt, *row.answers[0].tokens]
    assert ids == whole[: len(ids)]
    assert tokenizer.bos_token_id not in ids
    (row,) = read(tokenizer, prompt="one", completion="two")
    assert row.prompt[0] == tokenizer.bos_token_id


def test_what_stands_behind_the_last_turn_is_kept_where_it_is_wanted() -> None:
    tokenizer = tokenizer_of("bytes", CHATML)
    raw = [RawRow("rows.jsonl line 1", {"messages": TALK})]
    ((cut,),) = demonstrations(raw, Reader(tokenizer))
    ((whole,),) = demonstrations(raw, Reader(tokenizer, whole=True))
    assert whole.prompt == cut.prompt
    (short,), (long,) = cut.answers, whole.answers
    assert tokenizer.decode(long.tokens[len(short.tokens) :]) == "\n"
    assert long.tokens[: len(short.tokens)] == short.tokens
    assert sum(long.trained) == (len(short.tokens) if short.trained is None else sum(short.trained))
    assert not long.trained[-1]


TOOL_CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"messages": [TALK[0], TOOL_CALL]}, "chatml has no form for tool calls"),
        ({"messages": [{"role": "user", "content": None}, TALK[1]]}, "a message has no content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, TALK[1]]},
            "chatml has no form for a part that is no text",
        ),
        ({"messages": TALK, "tools": [{"type": "function"}]}, "chatml has no form for tools"),
    ],
)
def test_the_template_chatml_refuses_what_it_has_no_form_for(columns: Any, told: str) -> None:
    with pytest.raises(RLHFError, match=re.escape(told)):
        read(tokenizer_of("bytes", load.CHATML), **columns)


def test_the_template_chatml_joins_parts_of_text() -> None:
    tokenizer = tokenizer_of("bytes", load.CHATML)
    parts = [{"type": "text", "text": word} for word in ("two ", "words")]
    (row,) = read(tokenizer, messages=[{"role": "user", "content": parts}, TALK[1]])
    (plain,) = read(tokenizer, messages=[{"role": "user", "content": "two words"}, TALK[1]])
    assert row.prompt == plain.prompt


def test_a_conversation_without_a_template_names_the_setting() -> None:
    with pytest.raises(RLHFError) as caught:
        read(tokenizer_of("bytes"), messages=TALK)
    assert str(caught.value) == (
        "rows.jsonl line 1: this is a conversation, but the tokenizer has no chat template: "
        "set data.chat_template to a file or to chatml"
    )


def test_a_template_that_refuses_names_the_row_and_its_reason() -> None:
    with pytest.raises(RLHFError) as caught:
        read(
            tokenizer_of("bytes", GEMMA), messages=[{"role": "system", "content": "be kind"}, *TALK]
        )
    assert str(caught.value) == (
        "rows.jsonl line 1: the chat template refuses the conversation (System role not "
        "supported): "
        "change the row or set data.chat_template"
    )


def test_a_turn_that_cannot_be_told_from_the_rest_is_an_error() -> None:
    backwards = (
        "{% if add_generation_prompt %}{{ 'answer now' }}{% endif %}"
        "{% for m in messages | reverse %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    )
    with pytest.raises(RLHFError) as caught:
        read(tokenizer_of("bytes", backwards), messages=TALK)
    assert str(caught.value) == (
        "rows.jsonl line 1: the chat template renders the conversation in a way in which the "
        "assistant's turn cannot be "
        "told from the rest: put {% generation %} marks around it in a file and name that in "
        "data.chat_template"
    )


def test_rows_of_another_shape_say_what_they_have() -> None:
    tokenizer = tokenizer_of("bytes", CHATML)
    with pytest.raises(RLHFError) as caught:
        read(tokenizer, question="1 + 1", answer="2")
    assert str(caught.value) == (
        "rows.jsonl line 1: a row needs `messages`, `text`, or `prompt` and `completion`, "
        "but this one has `question`, `answer`: rename with columns in data"
    )
    with pytest.raises(RLHFError) as caught:
        read(tokenizer, messages=[{"from": "human", "value": "hi"}])
    assert str(caught.value) == (
        "rows.jsonl line 1: message 0 of `messages` has no `role`: "
        'it is {"from": "human", "value": "hi"}'
    )


SHARED = Path(__file__).parents[3] / "shared" / "data"


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
