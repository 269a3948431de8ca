"""From tokenised rows to a run that is ready for its first step."""

from pathlib import Path
from typing import Any

from rlhf.config.sections import Config
from rlhf.contract.checks import check_setup
from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.folder.run_folder import RunFolder
from rlhf.hookspecs import RunRecord
from rlhf.launch.places import Marker
from rlhf.memory.choice import choose, memory_error
from rlhf.memory.fit import StepFit
from rlhf.model.accelerated import kernels_on, rehearsed_attention
from rlhf.model.role import Role
from rlhf.registry.gateway import BackendGateway
from rlhf.registry.observers import ObserverGateway
from rlhf.request.reader import Request
from rlhf.request.settings_tree import leaves, to_tree
from rlhf.train import random_state
from rlhf.train.best import Best
from rlhf.train.context import RunContext
from rlhf.train.dataset import Dataset
from rlhf.train.fragments import num_bytes
from rlhf.train.introduction import introduce_models, introduce_run, plans_of
from rlhf.train.journal import Journal
from rlhf.train.rollout import Rollouts
from rlhf.train.samples import scores_answers
from rlhf.train.session import Session
from rlhf.train.speed import Speed, peak_of
from rlhf.trainer import Trainer


def set_up(
    request: Request,
    data: Dataset,
    mesh: Mesh,
    hooks: BackendGateway,
    observers: ObserverGateway,
    path: Path,
    folder: RunFolder | None,
    place: Marker,
    resumed: Path | None = None,
) -> Session:
    """Choose what is auto, load the models, and lay out the rows. Collective."""
    with place.startup.part("rehearsal"):
        fit, choice = choose_fit(request.config, data, mesh, hooks)
    config, trainer = fit.config, data.trainer
    run = RunContext(
        config=config, tokenizer=trainer.tokenizer, mesh=mesh, hooks=hooks, steps=fit.steps,
        longest=data.longest(config), examples=tuple(data.parts.values()), resumed=resumed, fit=fit,
        startup=place.startup, folder=path,
    )  # fmt: skip
    check_rollouts(request.name, trainer, config)
    identity = "" if folder is None else introduce_run(request, data, fit, choice, folder)
    trainer.setup(run)
    check_setup(trainer, run.roles)
    check_samples(request.name, trainer, config, run.roles["policy"])
    random_state.seed_generators(config.train.seed, mesh.shards.rank)
    settings = {name: it for name, it in leaves(to_tree(config)).items() if it is not None}
    record = RunRecord(
        name=request.name, folder=path, config=config, steps=run.steps, id=identity,
        settings=settings, plan=plans_of(run),
    )  # fmt: skip
    session = session_of(run, record, trainer, observers, folder, place)
    if folder is not None:
        folder.begin()
        introduce_models(request, run, folder, record.plan)
    return session


def session_of(
    run: RunContext,
    record: RunRecord,
    trainer: Trainer,
    observers: ObserverGateway,
    folder: RunFolder | None,
    place: Marker,
) -> Session:
    """Lay out the rows, and return what the loop needs. Collective."""
    config, mesh, trained = run.config, run.mesh, run.trained
    train_order, *eval_orders = (run.order(trainer, part) for part in range(len(run.examples)))
    saved = [role.engine for role in trained.values()]
    saved += [it.engine for it in run.followers if it.engine is not it.source]
    shapes = [role.shape for role in trained.values()]
    num_states = trained["policy"].shape.num_states(config.optimizer_kind)
    journal = Journal(
        folder=folder, observers=observers, record=record, engine=trained["policy"].engine,
        speed=Speed(shapes=shapes, peak=peak_of(mesh.device, mesh.world)), derive=trainer.derive,
        notes=run.notes,
    )  # fmt: skip
    return Session(
        record=record, config=config, mesh=mesh, hooks=run.hooks, trainer=trainer, trained=trained,
        followers=run.followers, saved_engines=saved, journal=journal, folder=folder, place=place,
        make_room=run.phases, sample=run.sample, frozen=run.frozen_files(),
        train_order=train_order, eval_order=eval_orders[0] if eval_orders else None,
        rollouts=None if not trainer.needs_rollout() else Rollouts(
            trainer, train_order, mesh, place, run.steps, run.ahead
        ),
        checkpoint_bytes=num_bytes(saved, run.hooks, mesh, num_states=num_states),
        best=Best(metric=config.checkpoint.best, patience=config.train.patience),
    )  # fmt: skip


def check_rollouts(name: str, trainer: Trainer, config: Config) -> None:
    """Raise RLHFError if recorded answers are asked for and the trainer makes none, and for a lag
    of a trainer that cannot draw ahead."""
    if config.rollouts.lag and type(trainer).draws is Trainer.draws:
        raise RLHFError(f"rollouts.lag: trainer {name!r} cannot draw answers ahead; remove it")
    if config.rollouts.replay is not None and not trainer.needs_rollout():
        raise RLHFError(
            f"rollouts.replay has no effect with trainer {name!r}, which trains on the answers of "
            "its rows; remove it"
        )


def check_samples(name: str, trainer: Trainer, config: Config, policy: Role) -> None:
    """Raise RLHFError if the policy has no samples to show."""
    if config.train.samples and policy.spec.task != "causal" and not scores_answers(trainer):
        raise RLHFError(
            f"train.samples: the policy of trainer {name!r} writes no text and its answers have no "
            "scores; remove train.samples, or define score() in the trainer"
        )


def choose_fit(
    requested: Config, data: Dataset, mesh: Mesh, hooks: BackendGateway
) -> tuple[StepFit, str]:
    """Return the fit with the resolved configuration, in which nothing is left to choose, and the
    line that explains the choice. Collective."""
    fit = step_fit(requested, data, mesh, hooks)
    any_tokens = requested.batch.tokens == "auto"

    def chosen() -> tuple[Config, str, str, frozenset[Any]]:
        with rehearsed_attention() as kinds:
            choice, line = choose(fit, any_tokens=any_tokens)
            under = fit.under(*choice)
            return under.resolved, under.layout, line, frozenset(kinds)

    # Ranks may see different amounts of device memory: rank 0 decides.
    resolved, layout, line, kinds = mesh.on_rank_zero(chosen)
    if kernels := kernels_on(mesh.device):
        kernels.compile_ahead(kinds, mesh.device)
    return fit.with_config(resolved, layout), line


def step_fit(requested: Config, data: Dataset, mesh: Mesh, hooks: BackendGateway) -> StepFit:
    """Return whether a step of this run fits."""
    return StepFit(
        data.trainer, data.with_token_budget(requested), mesh, hooks,
        steps=data.num_steps(requested), longest=data.longest(requested),
        largest=data.largest(requested),
        examples=tuple(data.parts.values()),
    )  # fmt: skip


def out_of_memory(
    requested: Config, data: Dataset, mesh: Mesh, hooks: BackendGateway, cause: BaseException
) -> RLHFError:
    """Return the error of a run whose accelerator ran out of memory."""
    fit = step_fit(requested, data, mesh, hooks)
    choice, _ = choose(fit, any_tokens=requested.batch.tokens == "auto")
    return memory_error(fit.under(*choice), cause)
