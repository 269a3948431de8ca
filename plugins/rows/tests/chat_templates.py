"""Chat templates of many styles, small tokenizers that have them, and rows read with them."""

from typing import Any

from read_rows import read_rows
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rlhf_rows import Reader, Row

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
NAMED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% if m.name is defined %} name="
    "{{ m.name }}{% endif %}{% if m.reasoning_content is defined %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template that prints each key that is defined."""
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


def calls_as(expression: str) -> str:
    """A template that writes each call by an expression of its function `f`."""
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
        "{% for c in m.tool_calls or [] %}{% set f = c.function %}{{ f.name + ' ' }}"
        + expression
        + "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


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


def adding_bos(template: str) -> Any:
    """A tokenizer that puts `<s>` before what it is given."""
    tokenizer = tokenizer_of("bytes", template)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


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


def read(tokenizer: Any, **columns: Any) -> list[Row]:
    (rows,) = read_rows("demonstration", [("rows.jsonl line 1", columns)], Reader(tokenizer))
    return rows
