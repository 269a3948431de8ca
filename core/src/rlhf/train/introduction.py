"""The first lines of a run, and what its folder holds before the first step."""

import time
from collections.abc import Mapping
from typing import Any

import attrs

from rlhf.config.sections import ModelConfig
from rlhf.errors import counted
from rlhf.folder.run_folder import RunFolder, write_error
from rlhf.memory.fit import StepFit
from rlhf.memory.rehearsal import NotRehearsed
from rlhf.model.accelerated import advice
from rlhf.model.dropout import largest_dropout
from rlhf.model.role import Role, trained_share
from rlhf.request.reader import Request
from rlhf.request.settings_tree import to_tree
from rlhf.train.context import RunContext
from rlhf.train.dataset import Dataset


def introduce_run(
    request: Request, data: Dataset, fit: StepFit, choice: str, folder: RunFolder
) -> str:
    """Print what is known before any weight is read, with the line `choice`, and begin the run's
    summary. Returns the run's identity."""
    identity = folder.identity()
    keep_traceback(fit, folder)
    demo = "demo: the embedded model and rows, since no model and data are set; "
    lines = [
        f"rlhf {request.name}  {demo if request.demo else ''}run folder {folder.path}",
        f"devices    {fit.mesh.world} x {fit.mesh.device.type}",
        f"data       train: {data.train.report}",
    ]
    if data.eval is not None:
        lines.append(f"           eval: {data.eval.report}")
    lines.append(
        f"steps      {fit.steps:,} of {counted(request.config.batch.size, 'row')}, "
        f"{data.steps_per_epoch(request.config):,} per epoch"
    )
    lines += [
        *advice(fit.mesh.device),
        *memory_lines(fit, choice),
        *request.notes,
        *data.warnings(),
    ]
    print("\n".join([*lines, *data.trainer.remarks(data.train)]), flush=True)
    folder.once_begun(lambda: folder.write_summary(id=identity, **summary(fit, data)))
    return identity


def keep_traceback(fit: StepFit, folder: RunFolder) -> None:
    """Write the traceback of a failed rehearsal, whose error `memory_lines` prints."""
    if fit.mesh.device.type == "cpu" or not isinstance(fit.rehearsed, NotRehearsed):
        return
    if traceback := fit.rehearsed.traceback:
        folder.once_begun(lambda: write_error(folder.path, "rehearsal.txt", traceback))


def memory_lines(fit: StepFit, choice: str) -> list[str]:
    """Return what the run prints about the memory of an accelerator before it reads weights."""
    if fit.mesh.device.type == "cpu":
        return []
    return [line for line in (choice, fit.line()) if line]


def summary(fit: StepFit, data: Dataset) -> dict[str, Any]:
    """Return what the run folder holds of the run as a whole, from its start."""
    mesh = fit.mesh
    estimate = None if mesh.device.type == "cpu" else fit.estimate
    return {
        "day": data.day.isoformat(), "started": time.time(), "steps": fit.steps,
        "ended": None, "error": None, "seconds": {},
        "devices": f"{mesh.world} x {mesh.device.type}",
        "data": {name: attrs.asdict(part.report) for name, part in data.parts.items()},
        "memory": estimate and {
            "parts": estimate.parts(), "peak": estimate.peak, "device": mesh.memory
        },
    }  # fmt: skip


def introduce_models(
    request: Request, run: RunContext, folder: RunFolder, plans: Mapping[str, Any]
) -> None:
    """Print how the models run, and write configuration, plans and versions into the folder."""
    config, policy = run.config, run.roles["policy"]
    # As requested: a run that is resumed on other hardware chooses again what is auto.
    folder.write_config(to_tree(request.config))
    folder.write_json("plan.json", plans)
    folder.write_versions(trainer=request.trainer, trust_remote_code=config.model.trust_remote_code)
    lines = [f"backend    {config.backend_name}: {policy.plan.summary}"]
    lines += [
        f"           {name}: {role.plan.summary}"
        for name, role in run.roles.items()
        if role.plan.summary != policy.plan.summary
    ]
    curve = depends_on_layout(run)
    folder.once_begun(lambda: folder.write_summary(curve=curve))
    lines += [*policy_lines(policy, config.model), *run.notes]
    lines += [f"curve      {curve}"] if curve else []
    print("\n".join(lines), flush=True)


def policy_lines(policy: Role, model: ModelConfig) -> list[str]:
    """Return what the run prints of its policy: size, precision, and how it runs packed batches."""
    parts = [f"{policy.shape.parameters:,} parameters", trained_share(policy.shape)]
    size = ", ".join(filter(None, [*parts, policy.plan.precision]))
    if policy.spec.task is None:
        return [f"model      {type(policy.engine.module).__name__}: {size}"]
    random = ", random weights" if model.init == "random" else ""
    return [f"model      {model.path}: {size}{random}", f"attention  {policy.attention}"]


def depends_on_layout(run: RunContext) -> str:
    """Return why the loss curve of this run differs on other hardware, or ""."""
    reasons = []
    if dropout := max(largest_dropout(role.engine.module) for role in run.trained.values()):
        reasons.append(f"dropout {dropout:g} is sampled per micro-batch")
    if run.config.model.fp8 is not None:
        reasons.append("products in FP8 are rounded differently in other micro-batches")
    return f"depends on ranks and batch.tokens: {', and '.join(reasons)}" if reasons else ""


def plans_of(run: RunContext) -> dict[str, Any]:
    """Return how each role runs, as plain data."""
    return {
        name: attrs.asdict(role.plan)
        | {
            "trained": role.spec.trained,
            "model": role.spec.model and to_tree(role.spec.model),
            "task": role.spec.task,
            "labels": role.spec.labels,
            "attention": role.attention and str(role.attention),
        }
        for name, role in run.roles.items()
    }
