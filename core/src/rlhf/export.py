"""The model folder that plain transformers or peft opens, from a live run or from a checkpoint."""

import json
import shutil
from pathlib import Path

from rlhf import checkpoint
from rlhf.config.reader import read_config
from rlhf.engine import Mesh, Plan
from rlhf.errors import RLHFError
from rlhf.gateway import load_hooks
from rlhf.model.export import save_model, save_tokenizer_and_config, verify_export
from rlhf.model.load import load_model, load_tokenizer
from rlhf.registry import load_object
from rlhf.session import Session


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
        save_tokenizer_and_config(session.engine.module, session.trainer.tokenizer, part, more)
        verify_export(part, session.engine.module)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    session.mesh.barrier()


def export_command(source: str, output: str) -> int:
    """`rlhf export RUN/checkpoints/step-N OUT`, or a run folder for its newest checkpoint."""
    folder, target = _checkpoint_folder(Path(source)), Path(output)
    if target.exists() and any(target.iterdir()):
        raise RLHFError(f"{target} is not empty: give a new folder")
    run = folder.parent.parent
    versions = json.loads((run / "versions.json").read_text())
    request = read_config(versions["trainer"], source=run / "config.yaml", overrides=[])
    config = request.config
    backend, _ = load_hooks(config)
    weights = backend.read_weights(directory=folder / "policy")
    plan = Plan(stage=0, precision=config.model.dtype)
    tokenizer = load_tokenizer(config)
    trainer = load_object(request.plugin.trainer, request.origin)(config.own, tokenizer)
    task = json.loads((run / "plan.json").read_text())["policy"]["task"]
    module = load_model(config, plan=plan, mesh=Mesh(), hooks=backend, task=task)
    target.mkdir(parents=True, exist_ok=True)
    save_model(module, weights, target)
    more = trainer.model_config(_newest_metrics(run, until=checkpoint.step_of(folder)))
    save_tokenizer_and_config(module, tokenizer, target, more)
    verify_export(target, module)
    print(f"exported {folder} to {target}")
    return 0


def _newest_metrics(run: Path, *, until: int) -> dict[str, float]:
    """The last value of every metric that the run had logged by that step."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found: dict[str, float] = {}
    for line in map(json.loads, lines):
        if line["step"] <= until:
            found |= line
    return found


def _checkpoint_folder(source: Path) -> Path:
    """The checkpoint that `source` names, undamaged."""
    if (source / "checkpoints").is_dir():
        newest = checkpoint.newest(source / "checkpoints")
        if newest is None:
            raise RLHFError(f"{source} holds no checkpoint yet: give another run folder")
        return newest
    if not (source.parent.parent / "config.yaml").is_file():
        raise RLHFError(
            f"{source} is no checkpoint of a run: give RUN/checkpoints/step-NNNNNN or RUN"
        )
    return checkpoint.named(source.parent, source.name)
