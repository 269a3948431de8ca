"""The kernels of this distribution behind the interface of `rlhf.kernels`. Those of the head are
imported when they first run."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.engine import fused_on
from rlhf.hookspecs import Finding
from rlhf.kernels import Tree
from rlhf.plugin import ModelConfig
from rlhf_kernels import compiler, layers, recurrent
from rlhf_kernels.attention import Attention, AttentionRow
from rlhf_kernels.diagnosis import findings
from rlhf_kernels.images import read_without_waits
from rlhf_kernels.loading import pinned_copies
from rlhf_kernels.lora import fuse_adapters
from rlhf_kernels.recurrent import Segments
from rlhf_kernels.scans import Scans
from rlhf_kernels.towers import fuse_tower
from rlhf_kernels.tree import Heads


class TritonKernels:
    """See `rlhf.kernels.Kernels`."""

    def __init__(self) -> None:
        self.attention = Attention()
        self.scans = Scans()

    def check(self, architecture: Any, model: ModelConfig, device: torch.device) -> None:
        """Raise RLHFError for what a model cannot run on a device."""
        layers.check_layers(architecture, model, device)

    def loading(self) -> AbstractContextManager[None]:
        """Copy weights through pinned memory in the body."""
        return pinned_copies()

    def change(
        self, decoder: Any, model: ModelConfig, device: torch.device, towers: Sequence[nn.Module]
    ) -> str:
        """Fuse layers in place, have gated ones recompute their products, and have images read
        without waits."""
        if towers:
            read_without_waits([*towers, decoder])
        if towers and model.kernels != "none" and fused_on(device.type):
            fuse_tower(towers)
        return layers.change_layers(decoder, model, device)

    def rehearse(self, decoder: Any, model: ModelConfig) -> None:
        """Change layers on the meta device, to keep what the real ones keep."""
        layers.rehearse_layers(decoder, model)

    def fuse_adapters(self, model: nn.Module, settings: ModelConfig, device: torch.device) -> None:
        """Add the updates of adapters into the products of the base."""
        fuse_adapters(model, settings, device)

    def compile(self, decoder: Any, recipe: str | None) -> str:
        """Compile layers by torch.compile."""
        return layers.compile_layers(decoder, recipe)

    def row(self, tree: Tree, *, windowed: bool) -> AttentionRow:
        """Return what computes attention of a row."""
        return self.attention.row(tree, windowed=windowed)

    def computes_trees(self, model: Any) -> bool:
        """Return whether the recurrent layers of a model can compute trees."""
        return recurrent.computes_trees(model)

    def run_trees(self, model: Any) -> Callable[[Tree], Segments]:
        """Have recurrent layers compute trees, by a library's scan where one is installed."""
        recurrent.run_trees(model)
        return lambda tree: Segments(tree, self.scans)

    def rehearsing(self) -> AbstractContextManager[Collection[Heads]]:
        """Note the kinds of attention that are rehearsed in the body."""
        return self.attention.rehearsing()

    def compile_ahead(self, kinds: Collection[Heads], device: torch.device) -> None:
        """Begin to compile the kernels of attention in threads."""
        self.attention.ahead.compile(kinds, device)

    def read_rows(
        self, logits: Tensor, targets: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """Read each row of logits [n, V] once."""
        if logits.is_meta:
            return logits.new_empty(4, len(logits), dtype=torch.float32)
        from rlhf_kernels.logits_triton import read_rows

        return read_rows(logits, targets, scale, softcap)

    def logit_gradient_(
        self,
        logits: Tensor,
        targets: Tensor,
        normaliser: Tensor,
        gradient: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Overwrite logits [n, V] with their gradient."""
        if logits.is_meta:
            return logits
        from rlhf_kernels.logits_triton import logit_gradient_

        return logit_gradient_(logits, targets, normaliser, gradient, scale, softcap)

    def compare_rows(
        self,
        student: Tensor,
        teacher: Tensor,
        targets: Tensor,
        weights: Tensor,
        measure: Any,
        **options: Any,
    ) -> Tensor:
        """Compare rows of logits [n, V] of two models by a `SkewedKL`, for rlhf-distill."""
        if student.is_meta:
            return student.new_empty(6, len(student), dtype=torch.float32)
        from rlhf_kernels.divergence_triton import compare_rows

        return compare_rows(student, teacher, targets, weights, measure, **options)

    def for_any_rows(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function once for any number of rows, for rlhf-distill."""
        return compiler.for_any_rows(function)

    def diagnose(self) -> Sequence[Finding]:
        """Return what optional packages are installed."""
        return findings()
