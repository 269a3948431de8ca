"""The random generators of one rank, saved and restored."""

import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file


def seed_generators(*numbers: int) -> None:
    """Seed Python, NumPy and torch from the run's seed, the rank and, on a resume, the step: ranks
    with different tokens draw different dropout. Call it after models are created, since their
    random weights must be equal on all ranks."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def save(path: Path, device: torch.device) -> None:
    """Write the state of Python's, NumPy's, torch's and the accelerator's generators."""
    version, numbers, gauss = random.getstate()
    kind, keys, *numpy_state = np.random.get_state()
    tensors = {
        "python": torch.tensor(numbers),
        "numpy": torch.from_numpy(np.asarray(keys, np.int64)),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        tensors["device"] = torch.get_device_module(device).get_rng_state(device)
    rest = {"python": [version, gauss], "numpy": [kind, *numpy_state]}
    # safetensors writes metadata entries in random order, so there is only one.
    save_file(tensors, path, {"rest": json.dumps(rest)})


def load(path: Path, device: torch.device) -> None:
    """Restore what `save` wrote."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        rest = json.loads(file.metadata()["rest"])
    version, gauss = rest["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    kind, *numpy_state = rest["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), *numpy_state))
    torch.set_rng_state(tensors["torch"])
    if "device" in tensors and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(tensors["device"], device)
