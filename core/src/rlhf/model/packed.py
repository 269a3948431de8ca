"""The module that a backend prepares: a transformers model over packed batches, with a readout."""

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import attrs
import torch
from torch import Tensor, nn

from rlhf.data.batch import TOKEN_INPUTS, PackedBatch
from rlhf.engine import Axis, Readout
from rlhf.errors import RLHFError
from rlhf.model import attention
from rlhf.model.accelerated import installed_kernels, kernels_on
from rlhf.model.extra import EXTRA_PREFIX, save_extra
from rlhf.model.head import LogitForm, read_head
from rlhf.model.masks import BLOCK, Tree, TreeTokens
from rlhf.model.parts import configs_of_towers, decoder, image_reader, unwrapped
from rlhf.model.router import balance_loss, recorded, routers_of
from rlhf.model.save import save_weights
from rlhf.model.sequence import all_rows, part_of_rank
from rlhf.model.unfold import Rows, padded_rows, rounded_up, unshared
from rlhf.sharding import is_sharded

PathName = Literal["tree", "packed", "padded", "separate"]
"""How packed batches are computed, the best path first.

tree: one row, a prompt once for all its answers; packed: one row, each answer with its own copy of
the prompt; padded: rows padded to the longest, the model's own attention; separate: one row at a
time.
"""

OUR_LAYERS = {
    "full_attention", "sliding_attention", "chunked_attention", "attention", "moe", "mlp", "dense",
    "sparse",
}  # fmt: skip
"""Layer types in transformers configs that our attention can compute, or that have none."""

SPARSE_LAYERS = {
    "indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention",
    "minimax_m3_sparse", "reference_sliding_attention",
}  # fmt: skip
"""Layer types that choose the tokens which they attend to. All others carry a state along the
row."""

TEXT_INPUTS = {"input_ids", "attention_mask", "position_ids", "seq_idx"}
"""Keyword arguments of a decoder of text."""

PREFIX = "model."
"""Prefix of the wrapped model's names in the state dict of a PackedModel."""


class PackedModel(nn.Module):
    """A transformers causal LM or classifier (perhaps under peft) that runs packed batches.

    `forward(batch, readout)` gives the readout the hidden states in the batch's layout, whichever
    path computed them. Nothing else reads the weights: outside a forward ZeRO-3 has none.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        path: PathName = "tree",
        layers: str = "",
        extra: Mapping[str, Tensor] | None = None,
        sequence: Axis | None = None,
        router_loss: float = 0.0,
    ) -> None:
        super().__init__()
        attention.register()
        self.model = model
        """The transformers model, or peft's wrapper of it."""
        self.layers = layers
        """One line on fused or compiled layers for the start of the run; empty without them."""
        self.extra = nn.ParameterDict(extra or {})
        """The trainer's own parameters, which a readout gets with the head."""
        self.sequence = sequence or Axis()
        """The ranks that divide the tokens of a packed row."""
        self.router_loss = router_loss
        """The coefficient of the router loss; 0 without one."""
        self.router_losses: list[Tensor] = []
        """What the forwards of a training step add up, scalars; the loop takes them."""
        self.tokens: int | None = None
        """Number of tokens that readouts see and answers are sampled from, the first of the head;
        None for all. `Run.limit_tokens` sets it."""
        self.form = LogitForm()
        """What the model does with the products of its head; the start-up probe sets it."""
        if hasattr(self.causal.base_model, "_rescale_layers"):
            self.causal.base_model._rescale_layers = lambda: None  # RWKV's halves weights in place.
        self.default_attention = default_attention(self.causal)
        parts = {n: getattr(self.causal.config, n, None) for n in self.causal.config.sub_configs}
        # A tower may have no other attention.
        self._eager = [n for n in parts if getattr(parts[n], "_attn_implementation", "") == "eager"]
        self.path = path

    @property
    def causal(self) -> Any:
        """The transformers model itself, without peft's wrapper; adapters are inside its layers."""
        return unwrapped(self.model)

    @property
    def path(self) -> PathName:
        """How hidden states are computed, and by which attention; the start-up probe sets it."""
        return self._path

    @path.setter
    def path(self, path: PathName) -> None:
        assert path in get_args(PathName), path
        self._path: PathName = path
        ours = path in ("tree", "packed") and takes_our_attention(self.causal) is None
        kernels = installed_kernels() if ours and recurrent_layers(self.causal) else None
        self._states = kernels.run_trees(self.causal) if kernels else None
        implementation = attention.NAME if ours else self.default_attention
        if self.causal.config._attn_implementation != implementation:
            parts = dict.fromkeys(("", *self.causal.config.sub_configs), implementation)
            own = {} if ours else dict.fromkeys(self._eager, "eager")
            self.causal.set_attn_implementation(parts | own)
            for config in configs_of_towers(self.causal) if ours else ():
                config._attn_implementation = attention.OF_IMAGES

    @property
    def extra_parameters(self) -> dict[str, nn.Parameter]:
        """The trainer's own parameters by name; sharded ones as they are."""
        return dict(self.extra.named_parameters())

    def forward(self, batch: PackedBatch, readout: Readout) -> dict[str, Tensor]:
        """Return `readout(hidden [T, H], head, batch)`. Collective at ZeRO-3."""
        is_balanced = self.router_loss and self.training and torch.is_grad_enabled()
        hidden = self.balanced(batch) if is_balanced else self.hidden(batch)
        head = read_head(self.causal)
        head = head if self.tokens is None else head.first(self.tokens)
        head = attrs.evolve(
            head, scale=self.form.scale, softcap=self.form.softcap,
            extra=dict(self.extra.items()), sequence=self.sequence,
        )  # fmt: skip
        # Some families keep the residual in float32.
        return dict(readout(hidden.to(head.weight.dtype), head, batch))

    def balanced(self, batch: PackedBatch) -> Tensor:
        """Return `hidden(batch)` and keep the sum of its router loss over the examples."""
        with recorded(routers_of(self.causal)) as logits:
            hidden = self.hidden(batch)
        logits = self.in_order(logits, batch)
        top = self.causal.config.get_text_config().num_experts_per_tok
        loss = balance_loss(logits, batch.example, examples=batch.num_examples, top=top)
        self.router_losses.append(loss)
        return hidden

    def in_order(self, logits: list[Tensor], batch: PackedBatch) -> list[Tensor]:
        """Return what routers gave on the current path, one after the other in each pass, for each
        router in the order of the batch: [T, experts], perhaps followed by other tokens."""
        if self.path in ("tree", "packed"):
            axis = self.sequence
            rows = [all_rows(part, axis.size * len(part), axis) for part in logits]
            if self.path == "tree":
                return rows
            _, back = unshared(batch)
            return [row[back] for row in rows]
        groups, back = padded_rows(batch, most=self.most_padded(batch))
        routers = len(routers_of(self.causal))
        of_groups = logits[: routers * len(groups)]
        return [torch.cat(of_groups[router::routers])[back] for router in range(routers)]

    def most_padded(self, batch: PackedBatch) -> int:
        """Return the most tokens of a pass over padded rows; 0 for one row each."""
        return len(batch.tokens) if self.path == "padded" else 0

    def save_weights(self, weights: Mapping[str, Tensor], directory: Path) -> None:
        """Write a model folder that plain transformers or peft opens.

        `weights` is the full state dict on the host, of this module or of the model in it. For a
        model with an adapter only the adapter is written, and its weights suffice.
        """
        dtype, own = self.causal.dtype, self.extra_parameters
        save_extra({name: weights[EXTRA_PREFIX + name].to(dtype) for name in own}, directory)
        weights = {n: value for n, value in weights.items() if not n.startswith(EXTRA_PREFIX)}
        if weights.keys() <= {PREFIX + name for name in self.model.state_dict()}:
            weights = {name.removeprefix(PREFIX): value for name, value in weights.items()}
        save_weights(self.model, weights, directory)

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Return the last hidden states [T, H] by the current path; only inside `forward`."""
        if batch.inputs and self.sequence.size > 1:
            raise RLHFError(
                f"the model's extra inputs ({', '.join(sorted(batch.inputs))}) belong to a whole "
                "row, which sequence ranks divide; set sequence_parallel to 1"
            )
        if self.path == "tree":
            return self.packed_row(batch)
        if self.path == "packed":
            row, back = unshared(batch)
            return self.packed_row(row)[back]
        return self.padded(batch, most=self.most_padded(batch))

    def packed_row(self, batch: PackedBatch) -> Tensor:
        """Return the hidden states [T, H] of one row under our attention. Collective if ranks
        divide the row."""
        num_tokens, axis = len(batch.tokens), self.sequence
        # Kernels of tree attention compute whole tiles.
        block = BLOCK if kernels_on(batch.tokens.device) else 1
        batch = rounded_up(batch, math.lcm(block, axis.size))
        size = len(batch.tokens)
        own = part_of_rank(size, axis)
        tree = Tree(batch, axis)
        states = {"seq_idx": self._states(tree)} if self._states else {}
        of_tokens = {n: batch.inputs[n][None] for n in TOKEN_INPUTS if n in batch.inputs}
        hidden = self.backbone(
            input_ids=batch.tokens[None, own],
            attention_mask=TreeTokens.of(tree),
            **states,
            **{"position_ids": batch.positions[None, own]} | batch.inputs | of_tokens,
        ).squeeze(0)
        return all_rows(hidden, size, axis)[:num_tokens]

    def padded(self, batch: PackedBatch, *, most: int) -> Tensor:
        """Return the hidden states [T, H] by the model's own attention, `most` tokens at a time."""
        groups, back = padded_rows(batch, most=most)
        # At ZeRO-3 every pass gathers weights, which all ranks must do equally often. So the ranks
        # agree on a number of passes before the first one.
        spare = self.most_passes(len(groups)) - len(groups)
        if not most:
            # A model's own positions are what the positions of the data are compared with.
            for group in groups:
                group.inputs.pop("position_ids", None)
        parts = [self.backbone(input_ids=it.tokens, **it.inputs).flatten(0, 1) for it in groups]
        hidden = torch.cat(parts)[back]
        again = groups[-1] if batch.inputs else Rows(batch.tokens[None, :1], {})
        for _ in range(spare):
            # The factor 0 keeps a spare pass in the graph: backward gathers weights too.
            hidden = hidden + 0 * self.backbone(input_ids=again.tokens, **again.inputs).sum()
        return hidden

    def backbone(self, **inputs: Any) -> Tensor:
        """Return hidden states [rows, length, H]: the decoder without its head, or with images what
        calls it. `inputs` that describe tokens are [rows, length, ...]."""
        further = inputs.keys() - TEXT_INPUTS
        part = image_reader(self.causal) if further else decoder(self.causal)
        for name in further:
            if inputs[name].is_floating_point():
                inputs[name] = inputs[name].to(self.causal.dtype)
        positions = inputs.get("position_ids")
        if positions is not None and positions.dim() == 3:
            inputs["position_ids"] = positions.movedim(2, 0)
        return part(**inputs, use_cache=False, return_dict=True)[0]

    def most_passes(self, passes: int) -> int:
        """Return the largest number of passes on any rank if weights are sharded, else `passes`.
        Collective."""
        sharded = any(is_sharded(parameter) for parameter in self.parameters())
        if not sharded or not torch.distributed.is_initialized():
            return passes
        count = torch.tensor(passes, device=next(self.parameters()).device)
        return int(Axis(size=torch.distributed.get_world_size()).max(count))


@attrs.define(kw_only=True, eq=False)
class BareEngine:
    """A module in place of an engine: no backend has prepared it, so it takes no steps."""

    module: Any
    device: torch.device
    precision: str
    role: str = "policy"
    sharded: bool = False

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the module's forward."""
        return self.module(*inputs, **options)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`."""
        loss.backward()

    def step(self) -> Any:
        raise AssertionError("no backend has prepared this engine")

    def train(self) -> None:
        """Switch recomputation on."""
        self.module.train()

    def eval(self) -> None:
        """Switch recomputation off."""
        self.module.eval()


def default_attention(causal: Any) -> str:
    """Return the name of the model's own correct attention. Up to transformers 5.17 Gemma 2 runs
    under SDPA by default, which silently ignores its soft cap."""
    config = causal.config.get_text_config()
    chosen: str = causal.config._attn_implementation
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "eager" if capped and chosen == "sdpa" else chosen


def recurrent_layers(causal: Any) -> list[str]:
    """Return the types of a model's layers that carry a state along the row; its model type if its
    config does not list its layers."""
    config = causal.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds and getattr(causal, "_is_stateful", False):
        return [config.model_type]
    return sorted(kinds - OUR_LAYERS - SPARSE_LAYERS)


def takes_our_attention(causal: Any) -> str | None:
    """Return why a model cannot run packed rows, under our attention; None if it can."""
    kinds = set(getattr(causal.config.get_text_config(), "layer_types", None) or ())
    recurrent = recurrent_layers(causal)
    kernels = installed_kernels()
    if recurrent and (kernels is None or not kernels.computes_trees(causal)):
        missing = ", and rlhf-kernels is not installed" if kernels is None else ""
        return f"it has recurrent layers ({', '.join(recurrent)}){missing}"
    if sparse := sorted(kinds & SPARSE_LAYERS):
        return f"it has sparse attention ({', '.join(sparse)})"
    if not causal._can_set_attn_implementation():
        return "its attention cannot be replaced"
    takes_positions = "position_ids" in inspect.signature(decoder(causal).forward).parameters
    # Convolutions and scans read no positions.
    if not takes_positions and (kinds & OUR_LAYERS or not recurrent):
        return "it takes no positions"
    return None
