"""What a run needs before its first step: tokenised rows, models, orders of rows."""

from pathlib import Path

import attrs
from attrs import frozen

from rlhf.config.sections import Config
from rlhf.data.order import RunOrder
from rlhf.data.tokenise import Examples, prepare
from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.folder.run_folder import RunFolder
from rlhf.hookspecs import RunRecord
from rlhf.journal.journal import Journal
from rlhf.journal.speed import Speed, peak_of
from rlhf.loop import random_state
from rlhf.loop.best import Best
from rlhf.loop.session import Session
from rlhf.loop.survey import Survey
from rlhf.memory.choice import START, choose
from rlhf.memory.fit import Headroom
from rlhf.model.architecture import known_tokens
from rlhf.model.tokenizer import load_tokenizer
from rlhf.registry.gateway import BackendGateway
from rlhf.registry.load import load_object
from rlhf.registry.observers import ObserverGateway
from rlhf.request.reader import Request
from rlhf.run.context import Run
from rlhf.run.introduction import introduce
from rlhf.trainer import Trainer


@frozen(kw_only=True)
class Data:
    """The tokenised rows, and the trainer that turned them into trees."""

    trainer: Trainer
    train: Examples
    eval: Examples | None

    @property
    def parts(self) -> list[Examples]:
        """The rows to train on, and the held-out ones if there are any."""
        return [part for part in (self.train, self.eval) if part]

    @property
    def longest(self) -> int:
        """Tokens of the longest path."""
        return max(int(part.longest_path.max()) for part in self.parts)

    def settled(self, config: Config) -> Config:
        """`config` with a number in the place of `batch.tokens: auto`: one that holds every
        example, and every one that a rollout may make."""
        if config.batch.tokens != "auto":
            return config
        made = config.data.max_tokens if self.trainer.needs_rollout() else 0
        tokens = max(START, made, *(int(part.lengths.max()) for part in self.parts))
        return attrs.evolve(config, batch=attrs.evolve(config.batch, tokens=tokens))

    def num_steps(self, config: Config) -> int:
        """Optimizer steps of the whole schedule."""
        per_epoch = -(-len(self.train) // config.batch.size)
        return config.train.steps or per_epoch * config.train.epochs


def prepare_data(request: Request) -> Data:
    """Tokenise what is not in the cache yet; without a collective, so that no rank waits at a
    barrier. Raises RLHFError for rows that cannot be used, tokens without an embedding among
    them."""
    config = request.config
    tokenizer = load_tokenizer(config)
    trainer = load_object(request.plugin.trainer, request.origin)(config.own, tokenizer)
    found = {
        which: prepare(config, trainer, tokenizer, which=which)
        for which in ("train", "eval")
        if getattr(config.data, which)
    }
    data = Data(trainer=trainer, train=found["train"], eval=found.get("eval"))
    _check_tokens(data, config)
    _check_surveyed(data, config)
    return data


def _check_surveyed(data: Data, config: Config) -> None:
    """Raise now what would be raised when the survey first sees its examples."""
    for name, part in (("train", data.train), ("eval", data.eval)):
        if part is not None:
            order = RunOrder.from_config(part, data.settled(config), data.trainer)
            try:
                order.surveyed(0)
            except RLHFError as error:
                raise RLHFError(f"data.{name}: {error}") from None
            except Exception:  # A trainer of others may need what only `setup` gives it.
                return


def _check_tokens(data: Data, config: Config) -> None:
    trainer, known = data.trainer, known_tokens(config)
    tokenizer = trainer.tokenizer
    # Only a trainer of raw rows can make up tokens that the tokenizer does not have.
    made_up = trainer.row_format is None
    if known is None or (not made_up and max(tokenizer.get_vocab().values()) < known):
        return
    for part in data.parts:
        beyond = part.first_beyond(known)
        if beyond is not None:
            where, number = beyond
            token = tokenizer.convert_ids_to_tokens(number)
            raise RLHFError(
                f"{where}: {config.model.path} has embeddings for {known:,} tokens and none for "
                f"{token!r} ({number}): choose the tokenizer that belongs to it (model.tokenizer), "
                "or give the model embeddings for all of its tokens"
            )


def set_up(
    request: Request,
    data: Data,
    mesh: Mesh,
    hooks: BackendGateway,
    observers: ObserverGateway,
    path: Path,
    folder: RunFolder | None,
) -> Session:
    """Models, orders of rows and the journal. Collective."""
    run = with_models(request.config, data, mesh, hooks)
    config, trainer, num_steps = run.config, data.trainer, run.steps
    # Not `data.parts`: those of the run have the values that its setup computed.
    train, *held_out = (
        RunOrder.from_config(
            part, config, trainer, shuffle=not number,
            rank=mesh.rank, ranks=mesh.world, device=mesh.device,
        )
        for number, part in enumerate(run.examples)
    )  # fmt: skip
    session = Session(
        record=RunRecord(name=request.name, folder=path, config=config, steps=num_steps),
        config=config, mesh=mesh, hooks=hooks, observers=observers, trainer=trainer,
        survey=Survey(trainer, mesh), engine=run.engines["policy"],
        followers=run.followers, schedule=run.schedule,
        train_order=train,
        eval_order=held_out[0] if held_out else None,
        num_steps=num_steps, path=path, folder=folder,
        best=Best(metric=config.checkpoint.best, patience=config.train.patience),
        speed=Speed(shape=run.shapes["policy"], peak=peak_of(mesh.device, mesh.world)),
    )  # fmt: skip
    session.journal = Journal(session)
    if folder is not None:
        introduce(request, session, run, train=data.train, held_out=data.eval)
    return session


def with_models(config: Config, data: Data, mesh: Mesh, hooks: BackendGateway) -> Run:
    """The trainer's models as it wants them, under what was chosen. Collective."""
    asked = headroom(config, data, mesh, hooks)
    # Of a device's memory one rank may see more than another: the first decides.
    any_tokens = config.batch.tokens == "auto"
    choice, why = mesh.gather(choose(asked, any_tokens=any_tokens) if mesh.rank == 0 else None)[0]
    asked = choice.of(asked)
    config = asked.config
    run = Run(
        config, data.trainer.tokenizer, mesh, hooks, steps=data.num_steps(config),
        longest=data.longest, examples=data.parts,
    )  # fmt: skip
    if mesh.rank == 0 and mesh.device.type != "cpu":
        run.notes += [line for line in (why, asked.line()) if line]
    data.trainer.setup(run)
    random_state.spread(config.train.seed, mesh.rank)
    return run


def out_of_memory(
    config: Config, data: Data, mesh: Mesh, hooks: BackendGateway, cause: BaseException
) -> RLHFError:
    """What to tell the user when the memory did not suffice for what was chosen."""
    asked = headroom(config, data, mesh, hooks)
    choice, _ = choose(asked, any_tokens=config.batch.tokens == "auto")
    return choice.of(asked).error(cause)


def headroom(config: Config, data: Data, mesh: Mesh, hooks: BackendGateway) -> Headroom:
    """Whether a step of this run fits."""
    return Headroom(
        data.trainer, data.settled(config), mesh, hooks, steps=data.num_steps(config),
        longest=data.longest, examples=data.parts,
    )  # fmt: skip
