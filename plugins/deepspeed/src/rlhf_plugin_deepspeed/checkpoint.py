"""An engine's state as the fragments that this rank holds, of which checkpoints are made."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain
from typing import Any

import torch
from attrs import frozen
from deepspeed.accelerator import get_accelerator
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from rlhf.engine import EngineState, Fragment, SavedState
from rlhf.errors import RLHFError
from rlhf_optim import RoundedAdamW
from rlhf_plugin_deepspeed.divided_state import SavedParts, of_whole
from rlhf_plugin_deepspeed.engine import InferenceEngine, TrainingEngine
from rlhf_plugin_deepspeed.nvme import state_files
from rlhf_plugin_deepspeed.weights import buffers

SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What the loss scaler of fp16 changes; at stage 0 it has no hysteresis."""


@frozen(kw_only=True, eq=False)
class Piece:
    """The part of a trained parameter that this rank updates."""

    parameter: nn.Parameter
    offset: int
    """Elements of the parameter before this part."""
    master: Tensor
    """The tensor that the optimizer updates: one parameter, or parts of many, flat."""
    start: int
    """Elements of `master` before this part."""
    size: int

    def of(self, values: Tensor) -> Tensor:
        """Return this part of `values`, which are laid out as `master` is."""
        return values.detach().view(-1).narrow(0, self.start, self.size)


def engine_state(engine: InferenceEngine) -> EngineState:
    """Return what this rank holds: views, and of matrices that are divided by columns copies of
    whole rows. Collective over the tensor axis."""
    fragments = list(_untrained(engine))
    if not isinstance(engine, TrainingEngine):
        return EngineState(fragments=list(of_whole(fragments, engine.module, engine.mesh)))
    names, optimizer = _names(engine), engine.deepspeed.basic_optimizer
    for piece in pieces(engine):
        values = {"weight": piece.of(piece.master)}
        state = optimizer.state.get(piece.master)
        if state:
            values |= {kind: piece.of(state[kind]) for kind in _kinds(optimizer, piece.master)}
            if piece.offset == 0 and "step" in state:
                values["step"] = torch.tensor([int(state["step"])])
        fragments += [
            Fragment(
                name=names[piece.parameter],
                kind=kind,
                offset=piece.offset,
                values=value,
                replicated=engine.stage == 0,
            )
            for kind, value in values.items()
        ]
    scaler = _scaler(engine)
    more = {name: getattr(scaler, name) for name in SCALER if hasattr(scaler, name)}
    whole = list(of_whole(fragments, engine.module, engine.mesh))
    return EngineState(fragments=whole, more={"scaler": more})


def restore(engine: InferenceEngine, saved: SavedState) -> None:
    """Restore what `engine_state` returned, of any layout. Collective."""
    saved = SavedParts(saved, engine.module)
    offload: Any = None
    if engine.stage == 3:
        optimizer = engine.runner.optimizer
        offload = getattr(optimizer, "parameter_offload", optimizer)
        # Small parameters are whole on every rank, and would keep their values.
        offload.partition_all_parameters()
        for parameter in engine.module.parameters():
            # Of the weights before.
            parameter.ds_secondary_tensor = None
    for item in _untrained(engine):
        saved.read(item.name, item.kind, item.offset, item.values)
    if isinstance(engine, TrainingEngine):
        _restore_optimizer(engine, saved)
        for name, value in saved.more.get("scaler", {}).items():
            setattr(_scaler(engine), name, value)
    if offload is not None and offload.persistent_parameters:
        offload.persistent_parameters[0].all_gather(offload.persistent_parameters)
    # The next gathering reads shards on another stream.
    get_accelerator().synchronize()


def pieces(engine: TrainingEngine) -> Iterator[Piece]:
    """Yield the parts of all trained parameters that this rank updates, some of them empty; the
    parameters come in the same order on every rank."""
    optimizer = engine.deepspeed.optimizer
    if engine.stage == 3:
        groups = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
        for group, flat in groups:
            yield from _shards(group, flat)
    elif engine.stage > 0:
        groups = zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True)
        for parameter, flat in ((item, flat) for group, flat in groups for item in group):
            part = parameter._hp_mapping
            offset, start, size = parameter.numel(), 0, 0
            if part is not None:
                offset, address = part.lp_fragment_address.start, part.hp_fragment_address
                start, size = address.start, address.numel
            yield Piece(parameter=parameter, offset=offset, master=flat, start=start, size=size)
    else:
        yield from _whole(engine, optimizer)


def _restore_optimizer(engine: TrainingEngine, saved: SavedState) -> None:
    names, optimizer = _names(engine), engine.deepspeed.basic_optimizer
    by_master: dict[Tensor, list[Piece]] = defaultdict(list)
    for piece in pieces(engine):
        by_master[piece.master].append(piece)
        saved.read(names[piece.parameter], "weight", piece.offset, piece.of(piece.master))
    for master, parts in by_master.items():
        steps = []
        for part in parts:
            name = names[part.parameter]
            # A parameter that never had a gradient has no state.
            for kind in sorted({*saved.kinds(name)} - {"weight", "step"}):
                state = optimizer.state[master]
                if kind not in state:
                    with state_files(engine.plan):
                        state[kind] = torch.zeros_like(master)
                saved.read(name, kind, part.offset, part.of(state[kind]))
            if "step" in saved.kinds(name):
                steps.append(torch.zeros(1))
                saved.read(name, "step", 0, steps[-1])
        if steps:
            step = torch.tensor(float(max(steps)), device=master.device)
            counts_in_tensors = not isinstance(optimizer, RoundedAdamW)
            optimizer.state[master]["step"] = step if counts_in_tensors else int(step)
    _publish(engine, chain.from_iterable(by_master.values()))


def _publish(engine: TrainingEngine, pieces: Iterable[Piece]) -> None:
    """Copy the optimizer's weights to those that the model computes with."""
    if engine.stage in (1, 2):
        engine.deepspeed.optimizer.update_lp_params()
        return
    for piece in pieces:
        held = getattr(piece.parameter, "ds_tensor", piece.parameter)
        held.detach().view(-1)[: piece.size].copy_(piece.of(piece.master))


def _shards(group: Iterable[Any], flat: Tensor) -> Iterator[Piece]:
    """Yield this rank's part of each parameter of a group at stage 3; `flat` holds them one after
    the other, each padded to the same size on all ranks."""
    start = 0
    for parameter in group:
        offset, size = _shard(parameter)
        yield Piece(parameter=parameter, offset=offset, master=flat, start=start, size=size)
        start += parameter.partition_numel()


def _shard(parameter: Any) -> tuple[int, int]:
    """Return offset and size of this rank's part of a parameter at stage 3, without padding."""
    most = parameter.partition_numel()
    offset = min(distributed.get_rank(parameter.ds_process_group) * most, parameter.ds_numel)
    return offset, min(most, parameter.ds_numel - offset)


def _whole(engine: TrainingEngine, optimizer: Any) -> Iterator[Piece]:
    """Yield all parameters at stage 0, where each rank updates all: with flat masters (AdamW),
    masters of their own (other optimizers), or none."""
    trained = [item for item in engine.module.parameters() if item.requires_grad]
    masters = {item: (item, 0) for item in trained}
    if hasattr(optimizer, "fp32_groups"):
        for group, copies in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            masters |= {item: (copy, 0) for item, copy in zip(group, copies, strict=True)}
    elif hasattr(optimizer, "fp32_groups_flat"):
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            starts = accumulate((item.numel() for item in group), initial=0)
            masters |= {item: (flat, start) for item, start in zip(group, starts, strict=False)}
    for item, (master, start) in masters.items():
        yield Piece(parameter=item, offset=0, master=master, start=start, size=item.numel())


def _untrained(engine: InferenceEngine) -> Iterator[Fragment]:
    """Yield frozen weights and the buffers of the state dict, but nothing of an adapter's base."""
    adapter_only = any(hasattr(part, "peft_config") for part in engine.module.modules())
    for name, parameter in engine.module.named_parameters():
        # The trainer's own parameters (`extra`) are at the model's head, outside of its base.
        of_base = not name.startswith("extra.") and "default" not in name.split(".")
        if parameter.requires_grad or (adapter_only and of_base):
            continue
        shard = getattr(parameter, "ds_tensor", None)
        if shard is None:
            offset, values = 0, parameter.detach().view(-1)
        else:
            offset, size = _shard(parameter)
            values = shard.detach().view(-1)[:size]
        yield Fragment(
            name=name, kind="weight", offset=offset, values=values, replicated=shard is None
        )
    if adapter_only:
        return
    for name, buffer in buffers(engine.module):
        yield Fragment(name=name, kind="weight", offset=0, values=buffer.view(-1), replicated=True)


def _names(engine: TrainingEngine) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in engine.module.named_parameters()}


def _scaler(engine: TrainingEngine) -> Any:
    """Return what holds the loss scale of fp16, or None."""
    if engine.precision != "fp16":
        return None
    optimizer = engine.deepspeed.optimizer
    return getattr(optimizer, "loss_scaler", None) or optimizer.loss_scale_config


def _kinds(optimizer: Optimizer, master: Tensor) -> list[str]:
    """Return the kinds of a tensor's states. Raises RLHFError for one that cannot be divided."""
    kinds = [kind for kind in optimizer.state[master] if kind != "step"]
    for kind in kinds:
        value = optimizer.state[master][kind]
        if not isinstance(value, Tensor) or value.shape != master.shape:
            raise RLHFError(
                f"{type(optimizer).__name__} keeps {kind}, which does not have one element per "
                "weight, so that a checkpoint could not be read in another layout; use another "
                "optimizer"
            )
    return kinds
