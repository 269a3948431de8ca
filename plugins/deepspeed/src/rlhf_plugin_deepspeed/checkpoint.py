"""Resumable state in DeepSpeed's own files, with a note of the layout that can load it."""

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn

from rlhf.errors import RLHFError
from rlhf_plugin_deepspeed.engine import TrainingEngine
from rlhf_plugin_deepspeed.optimizer import replay_steps

TAG = "deepspeed"
NOTE = "deepspeed.json"
MODEL_STATES = "mp_rank_00_model_states.pt"


def save(engine: TrainingEngine, directory: Path, state: Mapping[str, Any]) -> None:
    """Write the engine, its schedule and `state` into `directory`. Collective."""
    schedule = engine.schedule.state_dict() if engine.schedule is not None else None
    engine.deepspeed.save_checkpoint(
        str(directory),
        tag=TAG,
        client_state={"rlhf": {"state": dict(state), "schedule": schedule}},
        save_latest=False,
        exclude_frozen_parameters=is_adapter(engine.module),
    )
    if engine.mesh.rank == 0:
        note = {
            **{name: value for name, (value, _) in _layout(engine).items()},
            "deepspeed": metadata.version("deepspeed"),
            "adapter": is_adapter(engine.module),
            "trained": engine.masters,
        }
        (directory / NOTE).write_text(json.dumps(note, indent=1) + "\n")
    engine.mesh.barrier()


def load(engine: TrainingEngine, directory: Path) -> Mapping[str, Any]:
    """Restore `engine` and return the `state` that was saved. Raises RLHFError for another layout.
    Collective."""
    note = read_note(directory)
    _check_layout(engine, note, directory)
    with _own_clipping(engine.deepspeed.optimizer):
        _, client = engine.deepspeed.load_checkpoint(
            str(directory),
            tag=TAG,
            load_module_strict=not note["adapter"],
            load_lr_scheduler_states=False,
        )
    if engine.schedule is not None and client["rlhf"]["schedule"] is not None:
        engine.schedule.load_state_dict(client["rlhf"]["schedule"])
    replay_steps(engine.deepspeed.basic_optimizer)
    return client["rlhf"]["state"]


def _layout(engine: TrainingEngine) -> dict[str, tuple[Any, str]]:
    """Return what a checkpoint depends on, each with the setting that chooses it."""
    return {
        "stage": (engine.stage, "deepspeed.stage"),
        "ranks": (engine.mesh.world, "--nproc"),
        "precision": (engine.precision, "model.dtype"),
        "offload_optimizer": (
            engine.deepspeed.zero_offload_optimizer() is not None,
            "deepspeed.offload_optimizer",
        ),
    }


def _check_layout(engine: TrainingEngine, note: Mapping[str, Any], directory: Path) -> None:
    for name, (value, setting) in _layout(engine).items():
        if note[name] != value:
            written = json.dumps(note[name]).strip('"')
            raise RLHFError(
                f"the checkpoint {directory} was written with {name} {note[name]} but this run "
                f"has {value}; resume it with {setting} {written}"
            )


@contextmanager
def _own_clipping(optimizer: Any) -> Iterator[None]:
    """Keep this run's clipping. DeepSpeed takes it from the checkpoint, and refuses one that clips
    where this run leaves out the norm; older checkpoints over bf16 states are such."""
    kept = {
        name: getattr(optimizer, name)
        for name in ("clip_grad", "compute_grad_norm")
        if hasattr(optimizer, name)
    }
    if "compute_grad_norm" in kept:
        optimizer.compute_grad_norm = True
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(optimizer, name, value)


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Return the state dict in fp32 of a checkpoint of any stage and number of ranks, on the host.

    From an adapter's run it only holds the trained weights.
    """
    note = read_note(directory)
    weights = (
        _read_stage_0(directory, note) if note["stage"] == 0 else _read_shards(directory, note)
    )
    if not note["adapter"]:
        return weights
    # The base is not written, except a tied weight, which DeepSpeed keeps under its second name.
    trained = {name for names in note["trained"] for name in names}
    return {name: value for name, value in weights.items() if name in trained}


def _read_shards(directory: Path, note: Mapping[str, Any]) -> dict[str, Tensor]:
    # DeepSpeed prints its progress, shard by shard.
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        weights = get_fp32_state_dict_from_zero_checkpoint(
            str(directory), tag=TAG, exclude_frozen_parameters=note["adapter"]
        )
    if note["stage"] < 3:
        # Frozen weights are in no optimizer: at stage 1 only the module's state has them.
        weights = {**_model_states(directory)["module"], **weights}
    return _floats(weights)


def read_note(directory: Path) -> dict[str, Any]:
    """Return the note of the layout. Raises RLHFError where this backend wrote no checkpoint."""
    path = directory / NOTE
    if not path.is_file():
        raise RLHFError(
            f"{directory} is not a checkpoint of the deepspeed backend ({NOTE} is missing); name a "
            "folder under checkpoints/ of a run, or resume with the backend that wrote it"
        )
    return json.loads(path.read_text())


def is_adapter(module: nn.Module) -> bool:
    """Return whether only an adapter of peft's is trained, so that the base is not written."""
    return any(hasattr(part, "peft_config") for part in module.modules())


def _read_stage_0(directory: Path, note: Mapping[str, Any]) -> dict[str, Tensor]:
    states = _model_states(directory)
    weights = _floats(states["module"])
    optimizer = states["optimizer"]
    for index, names in enumerate(note["trained"]):
        if "fp32_groups_flat" in optimizer:
            sizes = [weights[name].numel() for name in names]
            masters = optimizer["fp32_groups_flat"][index].split(sizes)
        elif "fp32_groups" in optimizer:
            masters = optimizer["fp32_groups"][index]
        else:
            continue
        for name, master in zip(names, masters, strict=True):
            weights[name] = master.detach().view(weights[name].shape)
    # The master of a tied weight is saved under one of its names.
    for copy, original in (states.get("shared_params") or {}).items():
        weights[copy] = weights[original]
    return weights


def _model_states(directory: Path) -> dict[str, Any]:
    # A file of the user's own run; DeepSpeed pickles its settings beside the tensors.
    return torch.load(directory / TAG / MODEL_STATES, map_location="cpu", weights_only=False)


def _floats(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all weights in fp32 and buffers of integers as they are; tied weights stay one
    tensor."""
    made: dict[int, Tensor] = {}
    for value in weights.values():
        if id(value) not in made:
            made[id(value)] = value.float() if value.is_floating_point() else value
    return {name: made[id(value)] for name, value in weights.items()}
