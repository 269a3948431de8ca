"""Which configurations of flash-linear-attention's kernels are the fastest on a kind of device, for
`plugins/kernels/src/rlhf_kernels/tuned/`.

    python benchmarks/tuned_configs.py ~/.triton/cache FOLDER

Run a hybrid model first, on a machine that has not run one: flash-linear-attention then times the
configurations of each kernel, and Triton keeps the times in its cache. This script writes the
fastest one for each kind of arguments as flash-linear-attention reads them (`FLA_CONFIG_DIR`), also
for numbers of heads and tokens that were not timed, since the fastest one hardly depends on them.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

HEADS = (16, 32, 48, 64)
"""Heads of values in Qwen3-Next and Qwen3.5."""
BLOCKS = range(1, 65)
"""The tokens of a norm in thousands, as its key has them."""
VARIES = 1
"""The place of these numbers in a key."""


def main() -> int:
    cache, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    kernels: dict[str, dict[str, Any]] = {}
    for path in sorted(cache.rglob("*.autotune.json"), key=number):
        kernel = path.name.removesuffix(".autotune.json")
        timed = read(path)
        config, _ = min(timed["configs_timings"], key=lambda each: each[1][0])
        config = {name: config[name] for name in ("kwargs", "num_warps", "num_stages", "num_ctas")}
        for other in BLOCKS if "norm" in kernel else HEADS:
            key = [*timed["key"][:VARIES], other, *timed["key"][VARIES + 1 :]]
            text = json.dumps(key, separators=(",", ":"), sort_keys=True)
            name = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
            if other >= number(path) or "norm" in kernel:
                entry = {"autotune_key": key, "config": config}
                kernels.setdefault(kernel, {})[name] = entry
    for kernel, entries in sorted(kernels.items()):
        found = {"kernel_name": kernel, "autotune_entries": entries}
        text = json.dumps(found, separators=(",", ":"))
        (folder / f"{kernel}.json").write_text(f"{text}\n", encoding="utf-8")
        print(f"{kernel}: {len(entries)} kinds of arguments")
    return 0


def read(path: Path) -> dict[str, Any]:
    """Return what Triton keeps of a kernel's times."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def number(path: Path) -> int:
    """Return the number in a key that varies."""
    return int(read(path)["key"][VARIES])


if __name__ == "__main__":
    sys.exit(main())
