"""The one place that replaces the forward of a single module in a model.

A replacement is kept on the instance, so that the class and other models stay as they are, and
parameters keep their names. Replacements of one model must come in this order, since each wraps or
reads what the ones before it left (1 to 5 in the kernels, `rlhf_kernels` of ours):

1. `norms.fuse_norms`: RMS norms, with a gate or without, run our kernels.
2. `fused.fuse`: gated layers run Liger's kernels, or stand-ins on the meta device. The rotary
   embedding is replaced in the family's module.
3. `gates.recompute_products`: gated layers keep both factors and not their product. Those that step
   2 has replaced compute it by the fused product.
4. `lora.fuse_adapters`: adapters, which peft has put around linear modules meanwhile.
5. `layers.compile_layers`: after the start-up probe, which must compare the model's own numbers.
   First `fp8.to_fp8` exchanges linear modules, then come norms as in step 1, and last whole
   decoder layers, whose compiled forwards contain all of it.

A backend that divides linear layers may replace their forwards when it prepares the model, between
steps 4 and 5; the adapters of step 4 call them. FP8 is refused together with a tensor axis.

`layers.change_layers` does steps 1 to 3, on the meta device `layers.rehearse_layers` all but 4.
Compiled layers take the place of steps 2 and 3: torch.compile fuses gates itself.
"""

from collections.abc import Callable
from typing import Any

from torch import nn


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Have `module(...)` call `forward(...)`, a function that does not take the module."""
    module.__dict__["forward"] = forward


def replaced_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward that replaces the class's own; None if the class's runs."""
    return module.__dict__.get("forward")
