"""What must be the same on all ranks: versions, settings, rows, and the models that each host reads
from its own disk. Ranks that differ would train different models until their gradients mix."""

import hashlib
import json
import platform
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.config.sections import Config
from rlhf.data.cache import module_digest, tokenizer_digest
from rlhf.engine import Mesh, Plan
from rlhf.errors import SameOnAllRanks
from rlhf.folder.disk import sha256
from rlhf.folder.run_folder import RECORDED, version_of
from rlhf.model.packed import PackedModel
from rlhf.model.role import ModelSpec
from rlhf.registry.installed import find
from rlhf.request.reader import Request
from rlhf.request.settings_tree import flow, leaves, to_tree
from rlhf.train.dataset import Dataset
from rlhf.trainer import Trainer

OF_ONE_HOST = ("output", "observers", "data.workers", "data.processes")
"""Settings that may differ between hosts, or that only rank 0 reads."""
COPY = "copy one of the two to all hosts, or use a folder that all hosts share"
INSTALL = "install the same on all hosts"
WORDS, WORDS_ON_CPU = 1 << 22, 1 << 16
"""Words of 8 bytes that are multiplied at once; on the CPU, as many as its cache holds."""
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""2^64 divided by the golden ratio (splitmix64), as a negative number."""


def check_start(request: Request, data: Dataset, mesh: Mesh) -> None:
    """Raise RLHFError if ranks differ in versions, source code, settings, tokenizer or rows.
    Collective."""
    if mesh.world == 1:
        return
    config, tokenizer = request.config, data.trainer.tokenizer
    _check_alike(mesh, _versions(request), remedy=INSTALL)
    _check_alike(mesh, digests=_source_code(data.trainer, config), remedy=INSTALL)
    _check_alike(mesh, _settings(request), remedy="start all ranks with the same settings")
    template = getattr(tokenizer, "chat_template", None)
    found = {"chat template": template, "tokenizer": tokenizer_digest(tokenizer)}
    where = f", in {config.model.tokenizer or config.model.path}"
    _check_alike(mesh, digests=found, where=where, remedy=COPY)
    rows = {
        f"data.{which}" if len(part.files) == 1 else f"data.{which}.{number}": file.content
        for which, part in data.parts.items()
        for number, file in enumerate(part.files)
    }
    _check_alike(mesh, digests=rows, remedy=COPY)


def check_architecture(spec: ModelSpec, causal: Any, mesh: Mesh) -> None:
    """Raise RLHFError if ranks have read different configs of a model. Collective."""
    if mesh.world == 1:
        return
    found = leaves(causal.config.to_dict())
    found.pop("_name_or_path", None)
    where = f", in the config.json of {spec.role} {spec.config.model.path}"
    _check_alike(mesh, found, where=where, remedy=COPY)


def check_weights(spec: ModelSpec, module: PackedModel, plan: Plan, mesh: Mesh) -> None:
    """Raise RLHFError if ranks have read different weights of a model. Of sharded ones only
    rank 0 has read them. Collective otherwise."""
    model = spec.config.model
    if mesh.world == 1 or plan.sharded or model.init == "random":
        return
    found = {
        name.removeprefix("model."): fingerprint(value)
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor) and value.numel()
    }
    adapter = f" with the adapter {model.adapter}" if model.adapter else ""
    where = f", in {spec.role} {model.path}{adapter}"
    _check_alike(mesh, digests=found, where=where, remedy=COPY)


def fingerprint(value: Tensor) -> int:
    """Return a number of a tensor's bytes, a sum over its words of 8 bytes. A change of one word is
    never missed, and one of several only by a chance of 2^-64."""
    # Not as a subclass, such as that of weights in 4 bits.
    flat = value.detach().as_subclass(Tensor).contiguous().reshape(-1).view(torch.uint8)
    if len(flat) % 8 or flat.storage_offset() % 8:
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)])
    words, total = flat.view(torch.int64), torch.zeros([], dtype=torch.int64, device=value.device)
    size = WORDS_ON_CPU if value.device.type == "cpu" else WORDS
    places = torch.arange(1, 2 * min(size, len(words)), 2, device=value.device)
    for part in words.split(size):
        # All modulo 2^64: each of the three can be undone, and together they mix all bits.
        mixed = part * GOLDEN
        mixed ^= mixed >> 32 & 0xFFFFFFFF
        total = GOLDEN * total + (mixed * places[: len(part)]).sum()
    return int(total)


def _check_alike(
    mesh: Mesh,
    values: Mapping[str, Any] | None = None,
    *,
    digests: Mapping[str, Any] | None = None,
    where: str = "",
    remedy: str,
) -> None:
    """Raise RLHFError for the first of this rank's `values`, which the error shows, or `digests`
    that is another one on rank 0. Collective."""
    # An object counts by its type: its own text may have its address.
    text = json.dumps(digests if values is None else values, default=lambda it: type(it).__name__)
    # Few bytes, unless something differs.
    if len({*mesh.gather(hashlib.sha256(text.encode()).hexdigest())}) == 1:
        return
    ranks = mesh.gather((socket.gethostname(), json.loads(text)))
    host, expected = ranks[0]
    number, other_host, other = next(
        (number, *rank) for number, rank in enumerate(ranks) if rank[1] != expected
    )
    name = next(name for name in expected | other if expected.get(name) != other.get(name))
    rank, first = f"rank {number} on host {other_host}", f"rank 0 on host {host}"
    problem = f"{rank} has another {name} than {first}"
    if values is not None:
        theirs, ours = (flow([each.get(name)]) for each in (other, expected))
        problem = f"{rank} has {name} {theirs}, but {first} has {ours}"
    raise SameOnAllRanks(f"{problem}{where}; {remedy}")


def _versions(request: Request) -> dict[str, str]:
    """Return the versions of what computes a run's numbers."""
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    plugin = [] if request.origin is None else [request.origin.distribution]
    return versions | {name: version_of(name) or "(not installed)" for name in (*RECORDED, *plugin)}


def _source_code(trainer: Trainer, config: Config) -> dict[str, str]:
    """Return digests of the source code of core, trainer and backend, which two checkouts may have
    of one version."""
    kinds = {kind.__module__ for kind in type(trainer).__mro__} - {"builtins", "abc", "typing"}
    if trainer.row_format is not None:
        kinds.add(find("format", trainer.row_format).value.partition(":")[0])
    kinds.add(type(config.backend_section).__module__)
    modules = {name.partition(".")[0] for name in ("rlhf", *kinds)}
    return {f"source code of {name}": _digest_of(name) for name in sorted(modules)}


def _digest_of(module: str) -> str:
    """Return a digest of a package, or of the file of a module, beside which may be any others."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if hasattr(sys.modules.get(module), "__path__") or file is None:
        return module_digest(module)
    return sha256(Path(file))


def _settings(request: Request) -> dict[str, Any]:
    """Return the settings by name, without those of one host."""
    tree = leaves(to_tree(request.config))
    return {
        name: _without_paths(value)
        for name, value in tree.items()
        if not any(name == other or name.startswith(f"{other}.") for other in OF_ONE_HOST)
    }


def _without_paths(value: Any) -> Any:
    """Return a setting with the same text for all paths and names on the hub: hosts may have copies
    in different places, whose contents are compared."""
    if isinstance(value, Mapping):
        return {name: _without_paths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    return "(a path)" if isinstance(value, str) and "/" in value else value
