"""Make the folder from which the base model of the demo is trained: `python -m rlhf_devkit.scratch
FOLDER` writes the model's configuration and a byte-level tokenizer made from the demo's own text.
`base.yaml` of rlhf-demo is the recipe."""

import sys
from functools import cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from rlhf_demo import problems

SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make(folder: Path) -> None:
    """Write config.json and the tokenizer's files."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_tokenizer()), bos_token="<|begin|>",
        eos_token="<|end|>", pad_token="<|pad|>", model_max_length=512,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)


@cache
def _trained_tokenizer() -> str:
    """Return, as JSON, byte-level BPE with every digit a piece of its own, so that any text can be
    read."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    text = (f"{item.question}\n{item.solution}" for item in problems("train"))
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer.to_str()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
