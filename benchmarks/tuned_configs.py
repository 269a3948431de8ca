"""Which configurations of flash-linear-attention's kernels are the fastest on a kind of device, for
`plugins/kernels/src/rlhf_kernels/tuned/`.

    python benchmarks/tuned_configs.py ~/.triton/cache FOLDER

Run hybrid models first, on a machine that has not run one and with FLA_CACHE_MODE=disabled:
flash-linear-attention then times the configurations of each kernel for each kind of arguments, and
Triton keeps the times in its cache. This script writes one configuration for each kernel, as
flash-linear-attention reads it from FLA_CONFIG_DIR: the one that is the fastest on average over the
kinds, each in units of its fastest one.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

SETTINGS = ("kwargs", "num_warps", "num_stages", "num_ctas")


def main() -> int:
    cache, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    kernels: dict[str, list[dict[str, float]]] = defaultdict(list)
    for path in sorted(cache.rglob("*.autotune.json")):
        kernels[path.name.removesuffix(".autotune.json")].append(timed(path))
    for kernel, kinds in sorted(kernels.items()):
        run_in_all = set.intersection(*(set(kind) for kind in kinds))
        best = min(run_in_all, key=lambda config: sum(kind[config] for kind in kinds))
        found = {"kernel_name": kernel, "default_config": json.loads(best)}
        text = json.dumps(found, separators=(",", ":"))
        (folder / f"{kernel}.json").write_text(f"{text}\n", encoding="utf-8")
        print(f"{kernel}: {best}")
    return 0


def timed(path: Path) -> dict[str, float]:
    """Return how long each configuration of a kernel takes, in units of the fastest one."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    times = {
        json.dumps({name: config[name] for name in SETTINGS}): milliseconds[0]
        for config, milliseconds in found["configs_timings"]
    }
    fastest = min(times.values())
    return {config: time / fastest for config, time in times.items()}


if __name__ == "__main__":
    sys.exit(main())
