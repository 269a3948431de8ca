"""The tokenised rows of a run, checked against its trainer and its model."""

import math
from datetime import date
from fractions import Fraction

import attrs
from attrs import frozen

from rlhf.config.field_docs import documented
from rlhf.config.sections import Config
from rlhf.data.example import Example, longest_path, num_tokens
from rlhf.data.order import RunOrder
from rlhf.data.packing import blank_of, divided
from rlhf.data.tokenise import Examples, prepare
from rlhf.errors import RLHFError
from rlhf.folder.run_folder import day_of
from rlhf.memory.choice import START
from rlhf.model.architecture import known_tokens, saved_config
from rlhf.model.task import check_classifier, names_of_labels
from rlhf.model.tokenizer import load_tokenizer
from rlhf.registry.imports import load_object, load_record
from rlhf.registry.installed import find
from rlhf.request.reader import Request
from rlhf.train.samples import check_engine, rows_to_show, scores_answers
from rlhf.trainer import Trainer


@documented
@frozen(kw_only=True)
class Dataset:
    """The tokenised rows, and the trainer that turned them into trees."""

    trainer: Trainer
    """It has no models."""
    train: Examples
    """The rows to train on."""
    eval: Examples | None
    """The held-out rows."""
    day: date
    """The day that the chat template prints."""

    @property
    def parts(self) -> dict[str, Examples]:
        """The rows to train on as `train`, and the held-out ones as `eval` if there are any."""
        parts = {"train": self.train, "eval": self.eval}
        return {which: part for which, part in parts.items() if part}

    def longest(self, config: Config) -> int:
        """Return the tokens of the longest path, also of the paths that a rollout may make."""
        rows = max(int(part.longest_path.max()) for part in self.parts.values())
        return max(rows, *(longest_path(example) for example in self._made(config)))

    def largest(self, config: Config) -> int:
        """Return the tokens of the largest example, also of those that a rollout may make, as far
        as they cannot be divided."""
        rows = max(int(part.lengths.max()) for part in self.parts.values())
        made = self._made(config)
        if not self.trainer.needs_survey():
            made = [part for example in made for part in divided(example, 0)]
        return max(rows, *map(num_tokens, made))

    def with_token_budget(self, config: Config) -> Config:
        """Return `config` with a number for `batch.tokens: auto`, which holds every example."""
        if config.batch.tokens != "auto":
            return config
        tokens = max(START, self.largest(config))
        return attrs.evolve(config, batch=attrs.evolve(config.batch, tokens=tokens))

    def order(self, config: Config) -> RunOrder:
        """Return the steps of an epoch on one device, without what a rollout makes."""
        return RunOrder(examples=self.train, config=config)

    def steps_per_epoch(self, config: Config) -> int:
        """Return the number of optimizer steps of one epoch."""
        passes = self.trainer.rollout_passes if self.trainer.needs_rollout() else 1
        return -(-len(self.train) // config.batch.size) * passes

    def num_steps(self, config: Config) -> int:
        """Return the number of optimizer steps of the whole schedule."""
        # As it is written: 0.1 of 30 steps are 3, and 0.1 * 30 is more than 3 in floats.
        epochs = Fraction(str(config.train.epochs))
        return config.train.steps or math.ceil(epochs * self.steps_per_epoch(config))

    def warnings(self) -> list[str]:
        """Return a line for each part of the data of which many rows were dropped or cut."""
        warnings = (part.report.warning(which) for which, part in self.parts.items())
        return [f"warning    {warning}" for warning in warnings if warning]

    def _made(self, config: Config) -> list[Example]:
        """Return the largest examples that a rollout can make; without one, an empty example."""
        if not self.trainer.needs_rollout():
            return [Example([], [])]
        most = config.data.max_tokens
        return [self.trainer.rollout_shape(part, most) for part in self.parts.values()]


def prepare_data(request: Request, day: date | None = None) -> Dataset:
    """Read the tokenised rows of a run; those that are not in the cache are tokenised first. `day`
    replaces the day of the run.

    Without a collective, so that no rank waits for another one's cache. Raises RLHFError for rows
    that cannot be used, such as tokens without an embedding.
    """
    config, day = request.config, day or day_of(request)
    tokenizer = load_tokenizer(config, day)
    trainer = load_object(request.plugin.trainer, request.origin)(config.own, tokenizer)
    check_engine(trainer, config)
    _check_classifiers(trainer, config)
    parts = {
        which: prepare(config, trainer, tokenizer, which=which)
        for which in ("train", "eval")
        if getattr(config.data, which)
    }
    data = Dataset(trainer=trainer, train=parts["train"], eval=parts.get("eval"), day=day)
    _check_tokens(data, config)
    _check_images(data, config)
    for which, part in data.parts.items():
        try:
            trainer.check_examples(part)
        except RLHFError as error:
            raise RLHFError(f"data.{which}: {error}") from None
    if data.eval is not None:
        rows_to_show(trainer, data.eval, config.train.samples)
    return data


def _check_classifiers(trainer: Trainer, config: Config) -> None:
    """Raise RLHFError for a model of which transformers has none of the trainer's classifiers."""
    for head in trainer.classifiers(config):
        names = names_of_labels(head.task, head.labels)
        check_classifier(
            saved_config(config.model), head.task, names, config.model.path,
            otherwise=head.otherwise,
        )  # fmt: skip


def _check_images(data: Dataset, config: Config) -> None:
    """Raise RLHFError where an engine that reads text only would answer prompts with images."""
    for which, part in data.parts.items():
        samples = which == "eval" and config.train.samples and not scores_answers(data.trainer)
        if (samples or data.trainer.needs_rollout()) and blank_of(part) is not None:
            engine = find("rollouts", config.rollouts.engine)
            if not load_record(engine).images:
                raise RLHFError(
                    f"data.{which} has images, which {engine} does not read; set rollouts.engine "
                    "to embedded"
                )


def _check_tokens(data: Dataset, config: Config) -> None:
    """Raise RLHFError for a token without an embedding."""
    trainer, known = data.trainer, known_tokens(config)
    if known is None:
        return
    for part in data.parts.values():
        if beyond := part.first_beyond(known):
            where, number = beyond
            token = trainer.tokenizer.convert_ids_to_tokens(number)
            raise RLHFError(
                f"{where}: {config.model.path} has embeddings for {known:,} tokens but none for "
                f"{token!r} ({number}); set model.tokenizer to the tokenizer of this model, or add "
                "embeddings for all of its tokens to the model"
            )
