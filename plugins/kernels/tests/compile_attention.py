"""Compiles the kernels of tree attention for a GPU that need not be here, and prints the shared
memory of each: `compile_attention.py CAPABILITY BYTES WIDTH PRECISION`.

A process of its own: where tests run without a device, Triton interprets.
"""

import sys
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlhf_kernels import attention_triton
from rlhf_kernels.ahead import compile_kind
from rlhf_kernels.tree import Heads

OPTIONS = {"num_warps", "num_stages"}
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


class Compiled(NamedTuple):
    """In the place of a kernel: what would be launched is compiled."""

    kernel: Any
    target: GPUTarget

    def __getitem__(self, grid: Any) -> Any:
        return partial(self.warmup, grid=grid)

    def warmup(self, *given: Any, grid: Any, **constants: Any) -> None:
        options = {name: constants.pop(name) for name in OPTIONS & {*constants}}
        names = [parameter.name for parameter in self.kernel.params]
        values = dict(zip(names, given, strict=False)) | constants
        signature, attributes, fixed = {}, {}, {}
        for place, name in enumerate(names):
            value = values[name]
            if name in constants:
                signature[name], fixed[(place,)] = "constexpr", value
                continue
            is_tensor = isinstance(value, torch.Tensor)
            number = "fp32" if isinstance(value, float) else "i32"
            signature[name] = f"*{TYPES[value.dtype]}" if is_tensor else number
            if is_tensor or (number == "i32" and value % 16 == 0):
                attributes[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, fixed, attributes)
        print(triton.compile(source, target=self.target, options=options).metadata.shared)


def main() -> None:
    capability, memory, width = map(int, sys.argv[1:4])
    target = GPUTarget("cuda", capability, 32)
    attention_triton.MEMORY = memory
    for name in ("forward", "products", "backward"):
        kernel = Compiled(getattr(attention_triton, name), target)
        setattr(attention_triton, name, kernel)
    kind = Heads(6, 2, width, width, getattr(torch, sys.argv[4]), width**-0.5, None)
    for name in ("forward", "backward"):
        compile_kind(name, kind)


if __name__ == "__main__":
    main()
