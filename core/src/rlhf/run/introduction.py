"""How a run introduces itself: its first lines, and what its folder holds before the first step."""

from typing import Any

import attrs

from rlhf.data.examples import Examples
from rlhf.loop.session import Session
from rlhf.model.dropout import largest_dropout
from rlhf.request.layers import to_tree
from rlhf.request.reader import Request
from rlhf.run.context import Run


def introduce(
    request: Request, session: Session, run: Run, *, train: Examples, held_out: Examples | None
) -> None:
    """Write into the run folder what was asked and what came of it, and print the first lines: what
    runs, where and how."""
    assert session.folder is not None, "on the first rank alone"
    session.folder.write_config(to_tree(request.config))
    session.folder.write_json("plan.json", plans_of(run))
    session.folder.write_versions(
        trainer=request.name, trust_remote_code=run.config.model.trust_remote_code
    )
    remarks = session.trainer.remarks(train)
    lines = first_lines(request, session, run, train=train, held_out=held_out)
    warnings = lost_rows(train, held_out)
    said = [*lines, *run.notes, *curve_line(run), *request.notes, *warnings, *remarks]
    print("\n".join(said), flush=True)


def lost_rows(train: Examples, held_out: Examples | None) -> list[str]:
    """Return a warning for each part of the data of which many rows were dropped or cut."""
    warnings = [train.report.warning("train")]
    if held_out is not None:
        warnings.append(held_out.report.warning("eval"))
    return [f"warning    {warning}" for warning in warnings if warning]


def curve_line(run: Run) -> list[str]:
    """Why the loss curve of this run is not the same on other hardware, if it is not."""
    reasons = []
    dropout = largest_dropout(run.engines["policy"].module)
    if dropout:
        reasons.append(f"dropout {dropout:g} draws anew for each micro-batch")
    if run.config.model.fp8 is not None:
        reasons.append("products in FP8 are scaled by what stands in a micro-batch")
    return [f"curve      depends on ranks and batch.tokens: {', and '.join(reasons)}"] * bool(
        reasons
    )


def plans_of(run: Run) -> dict[str, Any]:
    """What the backend and the start-up probe made of each role, as plain data."""
    return {
        role: attrs.asdict(plan) | {"task": run.tasks[role], "attention": str(run.attention[role])}
        for role, plan in run.plans.items()
    }


def first_lines(
    request: Request, session: Session, run: Run, *, train: Examples, held_out: Examples | None
) -> list[str]:
    """What runs, where and how."""
    config, mesh, shape = request.config, session.mesh, run.shapes["policy"]
    plan = run.plans["policy"]
    demo = (
        "demo: the embedded model and rows, since neither model nor data was given; " * request.demo
    )
    trainable = "" if shape.trainable == shape.parameters else f", {shape.trainable:,} trained"
    lines = [
        f"rlhf {request.name}  {demo}run folder {session.path}",
        f"devices    {mesh.world} x {mesh.device.type}",
        f"backend    {config.backend_name}: {plan.summary}",
        f"model      {config.model.path}: {shape.parameters:,} parameters{trainable}, "
        f"{plan.precision}{', random weights' * (config.model.init == 'random')}",
        f"attention  {run.attention['policy']}",
        f"data       train: {train.report}",
    ]
    if held_out is not None:
        lines.append(f"           eval: {held_out.report}")
    lines.append(
        f"steps      {session.num_steps:,} of {config.batch.size} rows, "
        f"{session.train_order.steps_per_epoch:,} per epoch"
    )
    return lines
