"""Muon (K. Jordan et al., 2024, https://kellerjordan.github.io/posts/muon; arXiv 2502.16982):
matrices in the decoder's layers move along their momentum made orthogonal, all else by AdamW.

ZeRO cuts matrices anywhere. In a step each is put together on one rank, its owner, which makes it
orthogonal; then every rank gets back the part that it updates.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import AdamW

from rlhf.engine import Mesh, whole_shape
from rlhf.errors import RLHFError
from rlhf_optim import move, orthogonal
from rlhf_plugin_deepspeed.leaves import decoder_layers
from rlhf_plugin_deepspeed.plans import ZeroPlan
from rlhf_plugin_deepspeed.tensor import part_of

if TYPE_CHECKING:
    from rlhf_plugin_deepspeed.checkpoint import Piece

MOMENTUM = 0.95
"""Nesterov's; `optim.betas` are AdamW's."""
RMS = 0.2
"""Root mean square of an update, as AdamW's: its rates suit (arXiv 2502.16982, equation 4)."""
AT_ONCE = 1_000_000_000
"""Elements of the matrices that are put together at the same time."""


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the trained matrices in the decoder's layers, also stacks [experts, rows,
    columns], but no norms, biases and single rows. Raises RLHFError if there are none."""
    modules = [module for layer in decoder_layers(model) for module in layer.modules()]
    found = {
        parameter
        for module in modules
        if not type(module).__name__.endswith("Norm")
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad and not name.endswith("bias")
        if len(shape := whole_shape(parameter)) > 1 and min(shape[-2:]) > 1
    }
    if not found:
        raise RLHFError(
            "optim.name muon updates the matrices of the decoder's layers, none of which is "
            "trained here; set optim.name to adamw"
        )
    return found


class Muon(AdamW):
    """Muon for the `matrices` of the groups, AdamW for their other parameters."""

    exchange: "Exchange | None" = None
    """None in the step that DeepSpeed takes at start-up."""

    def __init__(
        self, params: Iterable[Mapping[str, Any]], *, matrices: Collection[Tensor], **settings: Any
    ) -> None:
        groups = [part for group in params for part in _split(group, matrices)]
        super().__init__(groups, fused=True, weight_decay=0.0, **settings)
        others = sum(len(group["params"]) for group in groups) - len(matrices)
        self.notes = [f"optimizer  Muon for {len(matrices)} matrices, AdamW for {others} others"]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["matrices"]]
        super().step(closure)
        self.param_groups = groups
        for group in groups:
            if group["matrices"] and self.exchange is not None:
                move(group, self.state, partial(self.exchange.moves, group["params"]))


def _split(group: Mapping[str, Any], matrices: Collection[Tensor]) -> Iterator[dict[str, Any]]:
    """Yield groups of matrices that are put together at the same time, and one of the others."""
    chosen = [item for item in group["params"] if item in matrices]
    ends = accumulate(whole_shape(item).numel() for item in chosen)
    for _, items in groupby(chosen, lambda _: next(ends) // AT_ONCE):
        yield {**group, "params": list(items), "matrices": True}
    if others := [item for item in group["params"] if item not in matrices]:
        yield {**group, "params": others, "matrices": False}


class Exchange:
    """Makes matrices orthogonal of which each rank of `mesh.shards` has one of the `pieces`, here
    with their sizes on each rank; at stage 0 every rank has all of them."""

    def __init__(self, pieces: Sequence["Piece"], plan: ZeroPlan, mesh: Mesh) -> None:
        self._mesh, self._whole = mesh, plan.stage == 0 or mesh.shards.size == 1
        # The iterations are published in bf16, in which they amplify what layouts round otherwise.
        self._dtype = torch.float32 if plan.precision == "fp32" else torch.bfloat16
        sizes = mesh.shards.gather([piece.size for piece in pieces])
        self._pieces = list(zip(pieces, zip(*sizes, strict=True), strict=True))

    def moves(
        self, masters: list[Tensor], gradients: list[Tensor], states: list[Tensor], _: Any
    ) -> list[Tensor]:
        """Return the `gradients` of the `masters` with the values of their orthogonal momentum: a
        `Rule`. Collective: all ranks update the same matrices."""
        torch._foreach_lerp_(states, gradients, 1 - MOMENTUM)
        torch._foreach_lerp_(gradients, states, MOMENTUM)
        moves = dict(zip(masters, gradients, strict=True))
        axis, pieces = self._mesh.shards, [it for it in self._pieces if it[0].master in moves]
        parts = [piece.of(moves[piece.master]) for piece, _ in pieces]
        flat = torch.cat([part.to(self._mesh.device, self._dtype) for part in parts])
        # Runs of about the same size, so that at stages 1 and 2 most matrices are already there.
        ends = list(accumulate(whole_shape(piece.parameter).numel() for piece, _ in pieces))
        owners = [(end - 1) * axis.size // ends[-1] for end in ends]
        given = [0] * axis.size
        for owner, part in zip(owners, parts, strict=True):
            given[owner] += part.numel()
        mine = [item for item, owner in zip(pieces, owners, strict=True) if owner == axis.rank]
        sources = [axis.rank] if self._whole else range(axis.size)
        taken = [sum(sizes[rank] for _, sizes in mine) for rank in sources]
        received = flat.split(given)[axis.rank] if self._whole else flat.new_empty(sum(taken))
        if not self._whole:
            distributed.all_to_all_single(received, flat, taken, given, group=axis.group)
        fragments = received.split([sizes[rank] for rank in sources for _, sizes in mine])
        for number, (piece, _) in enumerate(mine):
            _orthogonalize(piece.parameter, fragments[number :: len(mine)])
        if not self._whole:
            distributed.all_to_all_single(flat, received, given, taken, group=axis.group)
        elif axis.size > 1:
            for owner, share in enumerate(flat.split(given)):
                distributed.broadcast(share, group=axis.group, group_src=owner)
        values = flat.split([part.numel() for part in parts])
        for (piece, _), part, value in zip(pieces, parts, values, strict=True):
            part.copy_(value).mul_(RMS * max(whole_shape(piece.parameter)[-2:]) ** 0.5)
        return gradients


def _orthogonalize(parameter: Tensor, fragments: Sequence[Tensor]) -> None:
    """Make a matrix of these fragments orthogonal. Collective over an axis that divides it."""
    part, matrix = part_of(parameter), torch.cat(list(fragments))
    if part is None:
        matrix = orthogonal(matrix.view(whole_shape(parameter)))
    else:
        matrix = part.of(orthogonal(part.whole(matrix.view(parameter.shape))))
    values = matrix.reshape(-1).split([fragment.numel() for fragment in fragments])
    torch._foreach_copy_(list(fragments), values)
