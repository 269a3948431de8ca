"""The module that a backend prepares: a causal LM over packed batches, with a readout at its
end."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.data.batch import PackedBatch
from rlhf.errors import RLHFError
from rlhf.model import attention
from rlhf.model.head import read_head
from rlhf.model.masks import Tree, TreeTokens
from rlhf.model.unfold import in_whole_blocks, padded_groups, padded_rows, padded_way_back, unshared

PathName = Literal["tree", "packed", "padded", "separate"]
"""tree: a prompt once for all its answers; packed: every answer with its own copy of the prompt,
still in one row; padded: rows padded to the longest, the model's own attention; separate: one row
at a time."""


class PackedModel(nn.Module):
    """A transformers causal LM (perhaps under peft) that runs packed batches.

    `forward(batch, readout)` gives the readout the hidden states in the batch's layout, whatever
    path computed them. The weights are touched nowhere else, since outside a forward ZeRO-3 has
    none.
    """

    def __init__(self, model: nn.Module, *, path: PathName = "tree", layers: str = "") -> None:
        super().__init__()
        attention.register()
        self.model = model
        self.layers = layers
        """What was done to the model's layers, in words."""
        self.own_attention = own_attention(self.causal)
        self.path = path

    @property
    def causal(self) -> Any:
        """The transformers model itself, without peft's wrapper; adapters are inside its layers."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    @property
    def path(self) -> PathName:
        """How hidden states are computed; the start-up probe decides."""
        return self._path

    @path.setter
    def path(self, path: PathName) -> None:
        assert path in get_args(PathName), path
        self._path: PathName = path
        ours = path in ("tree", "packed") and takes_our_attention(self.causal) is None
        wanted = attention.NAME if ours else self.own_attention
        if self.causal.config._attn_implementation != wanted:
            self.causal.set_attn_implementation(wanted)

    def forward(
        self, batch: PackedBatch, readout: Callable[..., Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """`readout(hidden [T, H], head, batch)`, run inside this forward. Collective at ZeRO-3."""
        hidden = self.hidden(batch)
        return dict(readout(hidden, read_head(self.causal), batch))

    def hidden(self, batch: PackedBatch) -> Tensor:
        """The last hidden states [T, H] of a batch by the current path; only inside `forward`."""
        if self.path == "tree":
            return self.packed_row(batch)
        if batch.inputs:
            raise RLHFError(
                f"the model's extra inputs ({', '.join(sorted(batch.inputs))}) need tree "
                f"attention, and "
                f"{type(self.causal).__name__} runs on the path '{self.path}'"
            )
        if self.path == "packed":
            row, back = unshared(batch)
            return self.packed_row(row)[back]
        return self.padded(batch, most=len(batch.tokens) if self.path == "padded" else 0)

    def packed_row(self, batch: PackedBatch) -> Tensor:
        """Hidden states [T, H] of one row under our attention."""
        num_tokens = len(batch.tokens)
        if batch.tokens.device.type == "cuda":
            batch = in_whole_blocks(batch)
        return self.backbone(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            attention_mask=TreeTokens.of(Tree(batch)),
            **batch.inputs,
        )[0, :num_tokens]

    def padded(self, batch: PackedBatch, *, most: int) -> Tensor:
        """Hidden states [T, H] by the model's own attention, in groups of at most `most` tokens."""
        groups = padded_groups(batch, most=most)
        # Agreed before the first pass: each gathers weights in step with the other ranks.
        spare = self.most_passes(len(groups)) - len(groups)
        parts = [self.backbone(input_ids=padded_rows(batch, group)) for group in groups]
        hidden = torch.cat([part.flatten(0, 1) for part in parts])[padded_way_back(batch, groups)]
        for _ in range(spare):
            # Zero keeps a spare pass in the graph, since backward gathers weights too.
            hidden = hidden + 0 * self.backbone(input_ids=batch.tokens[None, :1]).sum()
        return hidden

    def backbone(self, **inputs: Any) -> Tensor:
        """The decoder without its head: hidden states [rows, length, H]."""
        return decoder(self.causal)(**inputs, use_cache=False, return_dict=True)[0]

    def most_passes(self, passes: int) -> int:
        """The largest number of passes on any rank, where weights are sharded and each pass gathers
        them."""
        distributed = torch.distributed
        sharded = any(hasattr(parameter, "ds_id") for parameter in self.parameters())
        if not sharded or not distributed.is_initialized():
            return passes
        parameter = next(self.parameters())
        count = torch.tensor(passes, device=parameter.device)
        distributed.all_reduce(count, op=distributed.ReduceOp.MAX)
        return int(count.item())


def own_attention(causal: Any) -> str:
    """The name of the attention that is right for this model without us. Up to transformers 5.17
    Gemma 2 runs under SDPA by default, which silently leaves its soft cap out."""
    config = causal.config.get_text_config()
    chosen: str = causal.config._attn_implementation
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "eager" if capped and chosen == "sdpa" else chosen


def takes_our_attention(causal: Any) -> str | None:
    """None when a model's layers let us put our attention in, else the reason why not."""
    config = causal.config.get_text_config()
    recurrent = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)
    if recurrent or getattr(causal, "_is_stateful", False):
        return f"it has recurrent layers ({', '.join(recurrent) or config.model_type})"
    if not causal._can_set_attn_implementation():
        return "its attention cannot be exchanged"
    if "position_ids" not in inspect.signature(decoder(causal).forward).parameters:
        return "it takes no positions"
    return None


def decoder(causal: Any) -> Any:
    """The part of a causal LM that ends in hidden states."""
    if causal.base_model is not causal:
        return causal.base_model
    # Llama 4's `base_model_prefix` names no attribute of its causal LM.
    return next(child for child in causal.children() if isinstance(child, PreTrainedModel))


ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Layer types of transformers configs that are attention; all others carry a state along the
row."""
