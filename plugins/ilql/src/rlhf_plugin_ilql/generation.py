"""Answers of an exported model that its heads guide."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, GenerationConfig, LogitsProcessor

from rlhf.errors import RLHFError
from rlhf.readouts import exported_extra, exported_model
from rlhf_plugin_ilql.heads import Q_NAMES, TARGET, inner_layer, value_of
from rlhf_rows import encode

# The mask says what is padding, so that no token has to stand for it.
left_padded = partial(pad_sequence, batch_first=True, padding_side="left")


class Guided(LogitsProcessor):
    """The model in the model folder or adapter folder of a run, with its heads.

    Tokens are drawn from softmax((log p + beta (Q - V)) / temperature), where Q is the lower one of
    the target heads, as in trlX. Of Q the last token's hidden state is needed, one row for each
    answer. Raises RLHFError for a folder without these heads.
    """

    def __init__(self, folder: str | Path, *, device: str = "cpu", dtype: Any = "auto") -> None:
        self.model = exported_model(folder, "causal", dtype=dtype).to(device).eval()
        """The language model, in plain transformers or peft."""
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        extra = exported_extra(folder)
        self.heads = {name: value.to(device, self.model.dtype) for name, value in extra.items()}
        """The parameters of all heads by name."""
        names = (TARGET + name for name in Q_NAMES)
        self.targets = [name for name in names if f"{name}_in_weight" in extra]
        if not self.targets:
            raise RLHFError(
                f"{folder} has no Q heads; pass the model/ folder of a run of `rlhf run ilql`"
            )
        self.beta = 1.0
        self._hidden = torch.empty(0)

    def advantages(self, hidden: Tensor) -> Tensor:
        """Return Q - V of every token [N, V] in float32, for hidden states [N, H]."""
        qs = [
            torch.nn.functional.linear(
                inner_layer(hidden, self.heads, name).float(),
                self.heads[f"{name}_out_weight"].float(),
                self.heads[f"{name}_out_bias"].float(),
            )
            for name in self.targets
        ]
        first = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
        v = value_of(first, inner_layer(hidden, self.heads, "v"), self.heads, "v")
        return torch.stack(qs).amin(0) - v[:, None]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the logits [N, V] of the next token with beta (Q - V) added. transformers calls
        it."""
        return scores.float().log_softmax(-1) + self.beta * self.advantages(self._hidden)

    @torch.no_grad()
    def generate(self, *inputs: Any, beta: float = 1.0, **options: Any) -> Tensor:
        """Return what `model.generate` returns for the same arguments, guided by `beta`; at 0 the
        language model alone writes. Of the folder's generation_config.json only the tokens that
        end and pad count: its penalties and limits would act before the heads. Not for two threads
        at once."""

        def keep(_: Any, inputs: Any, output: Any) -> None:
            self._hidden = output[0][:, -1]

        self.beta = beta
        others = options.pop("logits_processor", None) or []
        own = self.model.generation_config
        hook = self.model.get_decoder().register_forward_hook(keep)
        self.model.generation_config = GenerationConfig(
            eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
        )
        try:
            return self.model.generate(*inputs, logits_processor=[*others, self], **options)
        finally:
            self.model.generation_config = own
            hook.remove()

    def answers(self, prompts: Sequence[Any], *, beta: float = 1.0, **options: Any) -> list[str]:
        """Return an answer to each prompt, text or messages, tokenised as in training. `options`
        are those of `generate`, such as `max_new_tokens`, `do_sample` and `top_k`. Raises RLHFError
        for a prompt without tokens."""
        rows = [encode(self.tokenizer, prompt, "-").prompt for prompt in prompts]
        for number, row in enumerate(rows):
            if not row:
                raise RLHFError(f"prompts[{number}] has no tokens; write at least one word")
        ids = left_padded([torch.tensor(row) for row in rows]).to(self.model.device)
        mask = left_padded([torch.ones(len(row), dtype=torch.long) for row in rows]).to(ids.device)
        out = self.generate(input_ids=ids, attention_mask=mask, beta=beta, **options)
        tokens = out[:, ids.shape[1] :]
        texts: list[str] = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return texts
