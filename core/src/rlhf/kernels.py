"""What a distribution of kernels imports, which is found under the entry-point group
`rlhf.kernels`."""

from rlhf.data.packing import Spans, blank_batch
from rlhf.model.accelerated import Kernels, RowKernel, compiles, setting
from rlhf.model.masks import BLOCK, Scoring, Tree, TreeMask, scale_of
from rlhf.model.parts import layers_of

__all__ = [
    "BLOCK", "Kernels", "RowKernel", "Scoring", "Spans", "Tree", "TreeMask", "blank_batch",
    "compiles", "layers_of", "scale_of", "setting",
]  # fmt: skip
