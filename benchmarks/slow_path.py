"""`rlhf` by the slow path: padded rows under the model's own attention and layers, with torch's
operators instead of fused kernels and flash-linear-attention. What is fast is held against it
(`curves.py`).

    python benchmarks/slow_path.py run sft --model MODEL --data ROWS
"""

import sys
from typing import Any

from rlhf import devices

sys.modules["fla"] = None  # type: ignore[assignment]  # As if it were not installed.
devices.fused_on = lambda kind: False

from rlhf.commands.main import main  # noqa: E402
from rlhf.model.probe import AttentionPath  # noqa: E402
from rlhf.train import context  # noqa: E402


def padded(engine: Any, *arguments: Any, **options: Any) -> AttentionPath:
    """In the place of the probe."""
    engine.module.path = "padded"
    return AttentionPath(path="padded", reason="as benchmarks/slow_path.py wants it")


if __name__ == "__main__":
    context.choose_path = padded
    # More ranks would be processes of rlhf's own, without what is changed here.
    sys.exit(main([*sys.argv[1:], "--nproc", "1"]))
