"""The model folder that plain transformers or peft opens, from a live run or from a checkpoint."""

import functools
import json
import operator
import shutil
from pathlib import Path
from typing import Any

import attrs

from rlhf.engine import Mesh, Plan
from rlhf.errors import RLHFError
from rlhf.folder import checkpoints as checkpoint
from rlhf.folder.run_folder import logged
from rlhf.loop.session import Session
from rlhf.model.load import load_model
from rlhf.model.save import save_tokenizer_and_config, verify_export
from rlhf.model.tokenizer import load_tokenizer
from rlhf.registry.gateway import load_hooks
from rlhf.registry.load import load_object
from rlhf.request.reader import read_config


def export_model(session: Session) -> None:
    """Write `model/` of the run folder: to a hidden folder first, re-opened and compared by shape,
    then renamed. Collective."""
    part, target = session.path / ".model.part", session.path / "model"
    if session.folder is not None:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
    session.mesh.barrier()
    session.hooks.export_weights(engine=session.engine, directory=part)
    if session.folder is not None:
        more = session.trainer.model_config(session.journal.last)
        model = session.engine.module.model
        save_tokenizer_and_config(model, session.trainer.tokenizer, part, more)
        verify_export(part, model)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    session.mesh.barrier()


def export_checkpoint(folder: Path, run: Path) -> None:
    """Write `model/` of the run folder from one of its checkpoints, on this rank alone."""
    part, target = run / ".model.part", run / "model"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    write_model(folder, part)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)


def write_model(folder: Path, target: Path) -> None:
    """Make a model in the empty folder `target` of a checkpoint's weights."""
    run = folder.parent.parent
    trainer_name = _recorded(run / "versions.json", "trainer")
    task = _recorded(run / "plan.json", "policy", "task")
    request = read_config(trainer_name, source=run / "config.yaml", overrides=[])
    config = request.config
    backend, _ = load_hooks(config)
    weights = backend.read_weights(directory=folder / "policy")
    plan = Plan(stage=0, precision=config.model.dtype)
    tokenizer = load_tokenizer(config)
    trainer = load_object(request.plugin.trainer, request.origin)(config.own, tokenizer)
    # What only concerns the training does not concern the machine that exports.
    plain = attrs.evolve(config.model, kernels="none", fp8=None, recompute="none")
    config = attrs.evolve(config, model=plain)
    module = load_model(config, plan=plan, mesh=Mesh(), hooks=backend, task=task)
    module.save_weights(weights, target)
    more = trainer.model_config(_newest_metrics(run, until=checkpoint.step_of(folder)))
    save_tokenizer_and_config(module.model, tokenizer, target, more)
    verify_export(target, module.model)


def _recorded(path: Path, *keys: str) -> Any:
    """What a run has written down about itself."""
    try:
        return functools.reduce(operator.getitem, keys, json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RLHFError(
            f"{path} does not say {'.'.join(keys)}: a run writes this file at its start, so put it "
            "back or resume the run once"
        ) from error


def _newest_metrics(run: Path, *, until: int) -> dict[str, float]:
    """The last value of every metric that the run had logged by that step."""
    found: dict[str, float] = {}
    for line in logged(run, until=until):
        found |= json.loads(line)
    return found
