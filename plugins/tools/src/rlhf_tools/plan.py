"""`rlhf plan NAME CONFIG`: what a step takes of each accelerator in every layout of the backend,
what fits, and what a run would choose. Reads no weights and starts no process group."""

import json
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from rlhf.cli import Request
from rlhf.engine import GIB, Mesh, axes, gib
from rlhf.errors import RLHFError
from rlhf.preview import (
    NotRehearsed,
    StepFit,
    advice,
    choose,
    load_hooks,
    prepare_data,
    step_fit,
)

OTHER = ("buffers", "optimizer's step")
"""Parts that the table adds up in one column."""
FIRST = ("layout", "weights", "gradients", "masters", "optimizer", "other", "activations", "head")
LAST = ("peak", "host", "nvme", "fits")


def plan_command(
    request: Request, *, gpus: int | None, gpu_memory: float | None, as_json: bool
) -> int:
    """Print the layouts and the choice; returns 0, or 2 if a step of the run would not fit."""
    data = prepare_data(request)
    hooks, _ = load_hooks(request.config)
    here = mesh_of(gpus or request.nproc, gpu_memory)
    sizes = hooks.axis_sizes(config=request.config, ranks=here.world)
    places: dict[str, Any] = axes(0, **sizes)
    mesh = attrs.evolve(here, **places)
    fit = step_fit(request.config, data, mesh, hooks)
    if isinstance(fit.rehearsed, NotRehearsed):
        raise RLHFError(f"no plan: {fit.rehearsed.reason}")
    choice, reason = choose(fit, any_tokens=request.config.batch.tokens == "auto")
    chosen = fit.under(*choice)
    rows = [_row(chosen, layout.name) for layout in fit.layouts]
    report = {
        "gpus": mesh.world,
        "gpu_memory": mesh.memory,
        "tokens": choice.tokens,
        "recompute": "none" if choice.recompute == "auto" else choice.recompute,
        "chosen": chosen.chosen.name or chosen.chosen.plan.summary,
        "reason": reason,
        "peak": chosen.peak,
        "fits": chosen.fits,
        "advice": "" if chosen.fits else advice(chosen),
        "checkpoint": checkpoint_bytes(fit.rehearsed.run),
        "layouts": rows,
    }
    print(json.dumps(report, indent=2) if as_json else "\n".join(_lines(report, request)))
    return 0 if chosen.fits else 2


def checkpoint_bytes(run: Any) -> int:
    """Return the bytes of a checkpoint: of each trained weight the highest precision and the
    optimizer's states, frozen weights unless they are the base of an adapter, and the weights of a
    reference that moves."""
    frozen = 4 if run.config.model.dtype == "fp32" else 2
    size, total = 2 if run.config.optim.states == "bf16" else 4, 0
    for role in run.trained.values():
        shape, config = role.shape, role.spec.config
        has_adapter = config.lora is not None or config.model.adapter is not None
        total += int(size * (1 + shape.num_states(config.optimizer_kind)) * shape.trainable)
        beside = frozen if role.spec.task is None or not has_adapter else 0
        total += beside * (shape.parameters - shape.trainable)
        # Averages are not trained, but saved in float32 in any run.
        total += (4 - beside) * sum(role.spec.extra[it].numel() for it in role.spec.averages)
    moving = {follower.engine.role for follower in run.followers} - run.trained.keys()
    return total + sum(frozen * run.roles[name].shape.parameters for name in moving)


def mesh_of(ranks: int | None, gib_each: float | None) -> Mesh:
    """Return the ranks to plan for; this machine's where nothing is passed. Raises RLHFError if the
    memory of an accelerator is not known."""
    device = torch.accelerator.current_accelerator(check_available=True)
    ranks = ranks or (torch.accelerator.device_count() if device else 1)
    if gib_each is not None:
        memory = int(gib_each * GIB)
        return Mesh(world=ranks, device=device or torch.device("cuda"), memory=memory)
    if device is None:
        raise RLHFError("this machine has no accelerator; pass the memory of one: --gpu-memory 80")
    total = torch.get_device_module(device).mem_get_info()[1]
    return Mesh(world=ranks, device=device, memory=total)


def _row(fit: StepFit, layout: str) -> dict[str, Any]:
    """Return what a layout takes of each accelerator and of the host, in bytes."""
    row = fit.under(*fit.token_settings, layout)
    estimate = row.estimate
    assert estimate is not None
    return {
        "layout": layout or row.chosen.plan.summary,
        "settings": row.chosen.settings,
        "parts": estimate.parts(),
        "peak": estimate.peak,
        "host": estimate.host,
        "nvme": estimate.nvme,
        "fits": row.fits,
    }


def _lines(report: dict[str, Any], request: Request) -> Sequence[str]:
    """Return the table, in GiB, and the choice below it."""
    memory = report["gpu_memory"]
    title = (
        f"{request.name} {request.config.model.path}: {report['gpus']} x {gib(memory)} GiB, "
        f"{report['tokens']:,} tokens per micro-batch, recompute {report['recompute']}"
    )
    cells = [_cells(row) for row in report["layouts"]]
    roles = (name for row in cells for name in row if name not in (*FIRST, *LAST))
    last = [name for name in LAST if any(name in row for row in cells)]
    columns = [*FIRST, *dict.fromkeys(roles), *last]
    first = max(len(row["layout"]) for row in cells)
    widths = {name: max(len(name), 6) for name in columns} | {"layout": first}
    table = [
        "  ".join(
            f"{row.get(name, '-'):{'<' if name in ('layout', 'fits') else '>'}{widths[name]}}"
            for name in columns
        ).rstrip()
        for row in [{name: name for name in columns}, *cells]
    ]
    checkpoint = f"disk       {gib(report['checkpoint'])} GiB for each checkpoint"
    chosen = (
        f"chosen     {report['chosen']}: a step takes {gib(report['peak'])} of {gib(memory)} GiB"
        f"{'' if report['fits'] else ', which probably will not fit'}"
    )
    lines = [title, "GiB per rank at the peak of a step", "", *table, "", chosen]
    lines += [report["reason"]] if report["reason"] else []
    lines += [f"advice     {report['advice']}"] if report["advice"] else []
    return [*lines, checkpoint]


def _cells(row: dict[str, Any]) -> dict[str, str]:
    parts: dict[str, int] = {}
    for name, size in row["parts"].items():
        column = "other" if name in OTHER else name
        parts[column] = parts.get(column, 0) + size
    sizes = parts | {"peak": row["peak"], "host": row["host"]}
    sizes |= {"nvme": row["nvme"]} if row["nvme"] else {}
    cells = {name: gib(size) if size else "-" for name, size in sizes.items()}
    return {"layout": row["layout"]} | cells | {"fits": "yes" if row["fits"] else "no"}
