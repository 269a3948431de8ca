"""The first lines of a run, and what its folder holds before the first step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from rlhf.engine import Mesh
from rlhf.folder.run_folder import RunFolder
from rlhf.model.dropout import largest_dropout
from rlhf.rank.context import RunContext
from rlhf.rank.dataset import Dataset
from rlhf.request.reader import Request
from rlhf.request.settings_tree import to_tree


def introduce_run(
    request: Request,
    data: Dataset,
    mesh: Mesh,
    *,
    path: Path,
    steps: int,
    more: Sequence[str],
) -> None:
    """Print what is known before any weight is read: where the run is, its rows, and `more`."""
    demo = "demo: the embedded model and rows, since no model and data are set; " * request.demo
    lines = [
        f"rlhf {request.name}  {demo}run folder {path}",
        f"devices    {mesh.world} x {mesh.device.type}",
        f"data       train: {data.train.report}",
    ]
    if data.eval is not None:
        lines.append(f"           eval: {data.eval.report}")
    lines.append(
        f"steps      {steps:,} of {request.config.batch.size} rows, "
        f"{data.steps_per_epoch(request.config):,} per epoch"
    )
    remarks = data.trainer.remarks(data.train)
    print("\n".join([*lines, *more, *request.notes, *data.warnings(), *remarks]), flush=True)


def introduce_models(request: Request, run: RunContext, folder: RunFolder) -> None:
    """Print how the models run, and write the configuration, the plans and the versions into the
    run folder."""
    folder.write_config(to_tree(request.config))
    folder.write_json("plan.json", plans_of(run))
    folder.write_versions(
        trainer=request.trainer, trust_remote_code=run.config.model.trust_remote_code
    )
    config, policy = request.config, run.roles["policy"]
    shape, plan = policy.shape, policy.plan
    trained = "" if shape.trainable == shape.parameters else f", {shape.trainable:,} trained"
    lines = [
        f"backend    {config.backend_name}: {plan.summary}",
        *(
            f"           {name}: {role.plan.summary}"
            for name, role in run.roles.items()
            if role.plan.summary != plan.summary
        ),
    ]
    if policy.spec.task is None:
        name = type(policy.engine.module).__name__
        lines.append(
            f"model      {name}: {shape.parameters:,} parameters{trained}, {plan.precision}"
        )
    else:
        lines += [
            f"model      {config.model.path}: {shape.parameters:,} parameters{trained}, "
            f"{plan.precision}{', random weights' * (config.model.init == 'random')}",
            f"attention  {policy.attention}",
        ]
    print("\n".join([*lines, *run.notes, *curve_line(run)]), flush=True)


def curve_line(run: RunContext) -> list[str]:
    """Return why the loss curve of this run differs on other hardware, if it does."""
    reasons = []
    dropout = max(
        largest_dropout(role.engine.module) for role in run.roles.values() if role.spec.trained
    )
    if dropout:
        reasons.append(f"dropout {dropout:g} is sampled per micro-batch")
    if run.config.model.fp8 is not None:
        reasons.append("products in FP8 are scaled per micro-batch")
    return [f"curve      depends on ranks and batch.tokens: {', and '.join(reasons)}"] * bool(
        reasons
    )


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
