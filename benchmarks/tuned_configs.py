"""Which configurations of flash-linear-attention's kernels are the fastest on a kind of device.

    python benchmarks/tuned_configs.py ~/.triton/cache sm90

Run hybrid models first, with FLA_CACHE_MODE=disabled and an empty cache: flash-linear-attention
then times the configurations of each kernel for each kind of arguments, and Triton keeps the times
in its cache. This script writes one configuration for each kernel into
`plugins/kernels/src/rlhf_kernels/tuned.json`: the one that is the fastest on average over the kinds
of arguments, each in units of its fastest one.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "plugins/kernels/src/rlhf_kernels/tuned.json"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cache", type=Path, help="of Triton, such as ~/.triton/cache")
    parser.add_argument("device", help="kind of device, such as sm90")
    options = parser.parse_args()
    paths = sorted(options.cache.rglob("*.autotune.json"))
    if not paths:
        parser.error(f"{options.cache} has no *.autotune.json: run a hybrid model on a GPU first")
    kernels: dict[str, list[dict[str, float]]] = defaultdict(list)
    for path in paths:
        kernels[path.name.removesuffix(".autotune.json")].append(timed(path))
    found = json.loads(FILE.read_text(encoding="utf-8"))
    tuned = found.setdefault(options.device, {})
    for kernel, kinds in kernels.items():
        run_in_all = set.intersection(*(set(kind) for kind in kinds))
        best = min(run_in_all, key=lambda config: sum(kind[config] for kind in kinds))
        tuned[kernel] = json.loads(best)
        print(f"{kernel}: {best}")
    FILE.write_text(f"{json.dumps(found, indent=2, sort_keys=True)}\n", encoding="utf-8")
    return 0


def timed(path: Path) -> dict[str, float]:
    """Return how long each configuration of a kernel takes, in units of the fastest one."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    times = {
        json.dumps(arguments(config)): milliseconds[0]
        for config, milliseconds in found["configs_timings"]
    }
    fastest = min(times.values())
    return {config: time / fastest for config, time in times.items()}


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a launch that a configuration is."""
    return config["kwargs"] | {name: config[name] for name in ("num_warps", "num_stages")}


if __name__ == "__main__":
    sys.exit(main())
