"""The model folder that plain transformers or peft opens, of a live run or of a checkpoint."""

import functools
import json
import operator
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
from safetensors.torch import save_file
from torch import Tensor, nn

from rlhf.config.sections import ModelConfig
from rlhf.config.structure import structure
from rlhf.engine import Engine, Mesh
from rlhf.errors import RLHFError, listed
from rlhf.folder.checkpoints import step_of
from rlhf.folder.disk import new_folder, part_of
from rlhf.folder.run_folder import logged
from rlhf.model.architecture import DTYPES
from rlhf.model.extra import EXTRA_PREFIX
from rlhf.model.packed import PREFIX, PackedModel
from rlhf.model.role import POLICY, ModelSpec
from rlhf.model.save import SCORED_BY, buckets_of, save_tokenizer_and_config, verify_export
from rlhf.model.shape import empty_model
from rlhf.model.tokenizer import load_tokenizer
from rlhf.registry.gateway import BackendGateway
from rlhf.registry.imports import complete_export, load_object
from rlhf.request.reader import read_config
from rlhf.train.fragments import SavedEngine
from rlhf.train.session import Session
from rlhf.trainer import Trainer

BUCKET = 2**28
"""Bytes of weights that an export gathers at once, unless one weight is larger."""


def export_model(session: Session) -> None:
    """Write every trained model to a folder of the run folder, the policy to `model/` and last:
    first to a hidden folder, which is re-opened, compared by shape and renamed. Collective."""
    session.place.enter("export")
    for role in _policy_last(session.trained):
        _export(session, role)


def _export(session: Session, role: str) -> None:
    target, writes = session.record.folder / folder_of(role), session.folder is not None
    part, engine = part_of(target), session.trained[role].engine

    def write() -> None:
        write_weights(weights, engine.module, part)
        if isinstance(engine.module, PackedModel):
            usage = _usage(session.trainer, role, session.config.trainer_name, session.journal.last)
            model, extra = engine.module.model, engine.module.extra_parameters
            save_tokenizer_and_config(model, session.trainer.tokenizer, part, usage)
            verify_export(part, model, extra)
            complete_export(part, session.record.folder, role=role)

    with new_folder(target, replace=True) if writes else nullcontext():
        session.mesh.barrier()
        weights = whole_weights(session.hooks, engine, keep=writes)
        session.mesh.on_rank_zero(write, share=False)
    session.mesh.barrier()


def whole_weights(
    hooks: BackendGateway, engine: Engine, *, keep: bool, size: int = BUCKET
) -> dict[str, Tensor]:
    """Return the weights that an export of `engine` needs, whole and on the host, by their names in
    its module; none if not `keep`. At most `size` bytes, or one weight, are whole on the device at
    a time. Collective."""
    weights: dict[str, Tensor] = {}
    for bucket in hooks.weights(engine=engine, buckets=[*buckets_of(engine.module, size)]):
        if keep:
            weights |= {name: value.to("cpu", copy=True) for name, value in bucket.items()}
    return weights


def write_weights(weights: Mapping[str, Tensor], module: nn.Module, directory: Path) -> None:
    """Write whole weights, a tied one once: a model folder, or model.safetensors of a module of the
    trainer's own."""
    if isinstance(module, PackedModel):
        module.save_weights(_with_tied(weights, module), directory)
    else:
        whole = {name: value.contiguous() for name, value in weights.items()}
        save_file(whole, directory / "model.safetensors")


def _policy_last(roles: Iterable[str]) -> list[str]:
    """Return the roles in the order of their export: a run whose policy is written is exported."""
    return sorted(roles, key=POLICY.__eq__)


def folder_of(role: str) -> str:
    """Return the name of the folder of a trained model."""
    return "model" if role == POLICY else f"model-{role}"


def export_checkpoint(folder: Path, run: Path) -> None:
    """Write the trained models of one of the run's checkpoints as `export_model` does. Not
    collective."""
    plans = _recorded(run / "plan.json")
    for role in _policy_last(plans):
        if role == POLICY or plans[role].get("trained"):
            with new_folder(run / folder_of(role), replace=True) as part:
                write_model(folder, part, role)


def write_model(folder: Path, target: Path, role: str = POLICY) -> None:
    """Write a model of a checkpoint to the empty folder `target`. Not collective."""
    run = folder.parent.parent
    trainer_name = _recorded(run / "versions.json", "trainer")
    held = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if role not in held:
        raise RLHFError(f"{folder} has no model {role!r}; available: {', '.join(held)}")
    task, plan = (_recorded(run / "plan.json", role, *keys) for keys in (["task"], []))
    request = read_config(trainer_name, recorded=run / "config.yaml")
    config, weights = request.config, SavedEngine(folder / role).weights()
    if task is None:
        dtype = DTYPES[plan["precision"]]
        floats = {name: v.to(dtype) for name, v in weights.items() if v.is_floating_point()}
        write_weights(weights | floats, nn.Module(), target)
        return
    if plan.get("model") is not None:
        model, _ = structure(plan["model"], ModelConfig)
        config = attrs.evolve(config, model=model, lora=None)
    tokenizer = load_tokenizer(config)
    trainer = load_object(request.plugin.trainer, request.origin)(config.own, tokenizer)
    spec = ModelSpec(role=role, config=config, task=task, labels=plan.get("labels"))
    module = _plain_model(spec, weights)
    check_no_others(folder, weights, module)
    write_weights(weights, module, target)
    records = logged(run, until=step_of(folder))
    newest = {name: value for record in records for name, value in record.items()}
    usage = _usage(trainer, role, request.name, newest)
    save_tokenizer_and_config(module.model, tokenizer, target, usage)
    verify_export(target, module.model, module.extra_parameters)
    complete_export(target, run, role=role, until=step_of(folder))


def _plain_model(spec: ModelSpec, weights: Mapping[str, Tensor]) -> PackedModel:
    """Return the model of a checkpoint's `weights`, itself without values, and without what only
    training needs, which the machine that exports may not have."""
    plain = attrs.evolve(
        spec.config.model, kernels="none", fp8=None, recompute="none", quantize=None
    )
    config = attrs.evolve(spec.config, model=plain)
    extra = {
        name.removeprefix(EXTRA_PREFIX): value
        for name, value in weights.items()
        if name.startswith(EXTRA_PREFIX)
    }
    # An adapter's checkpoint has no weights of its base.
    adapted = config.lora is not None or config.model.adapter is not None
    whole = None if adapted else {n.removeprefix(PREFIX): value for n, value in weights.items()}
    return empty_model(attrs.evolve(spec, config=config, extra=extra), Mesh(), whole)


def check_no_others(folder: Path, weights: Mapping[str, Tensor], module: PackedModel) -> None:
    """Raise RLHFError if a checkpoint has weights that its model has no place for."""
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    if others := sorted(weights.keys() - own.keys()):
        names = listed([name.removeprefix(PREFIX) for name in others])
        raise RLHFError(
            f"{folder} has weights that {type(module.causal).__name__} has no place for: {names}; "
            "restore the model.path with which it was trained"
        )


def _usage(trainer: Trainer, role: str, name: str, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return what config.json says about how to use a model; its scorer is found by `name`."""
    if role != POLICY:
        return {}
    found = {} if trainer.scorer is None else {SCORED_BY: name}
    return found | dict(trainer.model_config(metrics))


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
        content = json.loads(path.read_text(encoding="utf-8"))
        return functools.reduce(operator.getitem, keys, content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"lacks {'.'.join(keys)}" if keys else "is missing or damaged"
        raise RLHFError(
            f"{path} {problem}; a run writes this file at its start, so restore it or "
            "resume the run once"
        ) from error
