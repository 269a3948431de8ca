"""The model folder that plain transformers or peft opens, of a live run or of a checkpoint."""

import functools
import json
import operator
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor, nn

from rlhf.engine import Mesh, Plan
from rlhf.errors import RLHFError
from rlhf.folder.checkpoints import step_of
from rlhf.folder.disk import new_folder, part_of
from rlhf.folder.run_folder import logged
from rlhf.loop.fragments import SavedEngine
from rlhf.loop.session import Session
from rlhf.model.load import load_model
from rlhf.model.save import save_tokenizer_and_config, verify_export
from rlhf.model.tokenizer import load_tokenizer
from rlhf.registry.gateway import load_hooks
from rlhf.registry.imports import load_object
from rlhf.request.reader import read_config


def export_model(session: Session) -> None:
    """Write the policy to `model/` of the run folder: first to a hidden folder, which is re-opened,
    compared by shape and renamed. Collective."""
    target, writes = session.record.folder / "model", session.folder is not None
    part = part_of(target)
    with new_folder(target, replace=True) if writes else nullcontext():
        session.mesh.barrier()
        session.hooks.export_weights(engine=session.engine, directory=part)
        if writes:
            more = session.trainer.model_config(session.journal.last)
            model = session.engine.module.model
            save_tokenizer_and_config(model, session.trainer.tokenizer, part, more)
            verify_export(part, model)
    session.mesh.barrier()


def export_checkpoint(folder: Path, run: Path) -> None:
    """Write one of the run's checkpoints to `model/` of the run folder. Not collective."""
    with new_folder(run / "model", replace=True) as part:
        write_model(folder, part)


def write_model(folder: Path, target: Path) -> None:
    """Write the model of a checkpoint to the empty folder `target`. Not collective."""
    run = folder.parent.parent
    trainer_name = _recorded(run / "versions.json", "trainer")
    task = _recorded(run / "plan.json", "policy", "task")
    request = read_config(trainer_name, recorded=run / "config.yaml")
    config = request.config
    backend, _ = load_hooks(config)
    plan = Plan(stage=0, precision=config.model.dtype)
    tokenizer = load_tokenizer(config)
    trainer = load_object(request.plugin.trainer, request.origin)(config.own, tokenizer)
    # The machine that exports need not have what only speeds up training.
    plain = attrs.evolve(config.model, kernels="none", fp8=None, recompute="none")
    config = attrs.evolve(config, model=plain)
    module = load_model(config, plan=plan, mesh=Mesh(), hooks=backend, task=task)
    module.save_weights(_with_tied(SavedEngine(folder / "policy").weights(), module), target)
    records = logged(run, until=step_of(folder))
    newest = {name: value for record in records for name, value in record.items()}
    save_tokenizer_and_config(module.model, tokenizer, target, trainer.model_config(newest))
    verify_export(target, module.model)


def _with_tied(weights: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Return `weights` with a tied one under each of its names."""
    first = {id(item): name for name, item in module.named_parameters()}
    tied = module.named_parameters(remove_duplicate=False)
    names = {name: first[id(item)] for name, item in tied}
    every = {name: weights[source] for name, source in names.items() if source in weights}
    return {**weights, **every}


def _recorded(path: Path, *keys: str) -> Any:
    """Return an entry of a JSON file that the run wrote at its start."""
    try:
        return functools.reduce(operator.getitem, keys, json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RLHFError(
            f"{path} lacks {'.'.join(keys)}; a run writes this file at its start, so restore it or "
            "resume the run once"
        ) from error
