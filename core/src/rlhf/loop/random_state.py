"""The random generators of one rank, saved and restored without a pickle of code."""

import random
from pathlib import Path

import numpy as np
import torch


def spread(seed: int, rank: int) -> None:
    """Give each data rank its own dropout. Called once the models exist, which all ranks must draw
    alike."""
    seed = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def save(path: Path, device: torch.device) -> None:
    """Write the state of Python's, NumPy's, torch's and the accelerator's generators."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": (version, list(numbers), gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    torch.save(state, path)


def load(path: Path, device: torch.device) -> None:
    """Restore what `save` wrote. Without a file, the rank keeps the seeds of the start."""
    if not path.exists():
        return
    state = torch.load(path, weights_only=True)
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "device" in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"], device)
