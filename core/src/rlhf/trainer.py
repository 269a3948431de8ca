"""What a trainer's module imports: the base class, the row as a tree, the batch and the loss."""

import abc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import attrs
import numpy as np
import torch
from attrs import field, frozen, validators
from torch import Tensor, nn

from rlhf.config.field_docs import documented
from rlhf.config.reference_modes import ReferenceMode
from rlhf.config.sections import Config, ModelConfig, OptimConfig
from rlhf.data.batch import PackedBatch
from rlhf.data.example import Answer, Example
from rlhf.data.examples import Examples, Packable
from rlhf.data.packing import prompt_inputs, with_answers
from rlhf.data.rows import Row
from rlhf.engine import Engine, ModelShape, Readout
from rlhf.registry.imports import load_user_object

T = TypeVar("T")

__all__ = [
    "Answer",
    "Average",
    "Classifier",
    "Example",
    "Examples",
    "Loss",
    "Packable",
    "PackedBatch",
    "Reference",
    "Row",
    "Run",
    "Sample",
    "Term",
    "Trainer",
    "answer_seeds",
    "load_user_object",
    "prompt_inputs",
    "with_answers",
]


@documented
@frozen(kw_only=True)
class Classifier:
    """A head with which a trainer loads the model of the configuration."""

    task: Literal["sequence", "token"]
    """As in `Run.load`."""
    labels: int | None = None
    """As in `Run.load`."""
    otherwise: str = ""
    """What else a user can do whose model's family has no such head, such as `set ...`."""


@documented
@frozen
class Term:
    """One addend of the loss: `weight * sum / total(per)`."""

    sum: Tensor
    """Scalar: the sum over this micro-batch, never a mean."""
    per: str
    """The count by which core divides, totalled over the optimizer step and all ranks: `examples`,
    `answers`, `tokens` (predictions), `labels` (values per token that are not nan), or the name of
    a value of the survey, or of a value per example or answer of a rollout, whose sum over the step
    is then the count."""
    weight: float = 1.0
    """Factor on the term."""
    role: str = "policy"
    """The trained model that gets the gradient of the term; it must depend on no other's weights
    (detach what it uses of them). The loss is the sum of all terms."""


@documented
@frozen
class Loss:
    """The result of `Trainer.loss` for one micro-batch."""

    terms: tuple[Term, ...]
    """The addends of the loss."""
    metrics: Mapping[str, tuple[Tensor, str] | float] = field(factory=dict)
    """`{name: (sum, per)}`; core detaches the sums, and the run reports sum / total(per). The names
    must be the same on all ranks and in all micro-batches; those that core uses, such as `loss`,
    are errors. Special values of `per`: with "" only `derive` gets the sum, which may have a
    dimension (a histogram); with "min" or "max" the value is the extreme of this micro-batch, and
    the run reports the extreme of the step. A plain number, such as a coefficient, is reported as
    it is; it must be the same on all ranks and in all micro-batches of the step."""


def answer_seeds(seeds: Sequence[int], answers: int) -> list[int]:
    """Return the seeds of `answers` answers to each prompt, one prompt after the other, from the
    seeds that `Trainer.rollout` gets."""
    return [seed + number for seed in seeds for number in range(answers)]


@documented
@frozen
class Sample:
    """One answer that a model has written."""

    tokens: list[int]
    """Token ids, with the token that ends the answer if it was reached."""
    logprobs: list[float]
    """The log-probability of each token when it was drawn, at the temperature of the draw (at 1
    for temperature 0); nan for one that was not drawn, since a tool returned it."""
    finished: bool = True
    """Whether the answer has ended itself; if not, it was cut at its largest length."""
    version: int | None = None
    """Optimizer steps of the weights that wrote it, if it was drawn ahead (`rollouts.lag`)."""


@documented
class Trainer(abc.ABC):
    """Base class of a training workflow. Subclasses implement `example`, `setup` and `loss`."""

    row_format: ClassVar[str | None] = None
    """The name of the row format by which rows are token ids before `example` is called:
    `demonstration`, `preference`, `unpaired` or `prompt` (without answers) of rlhf-rows, or that of
    another plugin. With None `example` gets the row as a dictionary."""
    renders_whole: ClassVar[bool] = False
    """Whether a prompt and its answer are tokenised as one text, and a conversation keeps what the
    chat template writes after its last turn, such as a line break. True for models that are read at
    the end of a whole text. Otherwise the prompt has the tokens of the text that the model
    continues, and the answer its own."""
    row_sources: Any = None
    """What decides what `example` returns beside the trainer's settings and modules, such as the
    JSON schemas of tools: plain data, by which the cache of rows is found."""
    scorer: ClassVar[type[Any] | None] = None
    """The class that opens the exported models as `Scorer(folder, device=device, dtype=dtype)`;
    `rlhf serve` needs it, and finds it by the trainer's name in the exported config.json."""

    rollout_batches: int = 1
    """How many steps' rows `rollout` gets at once."""
    rollout_passes: int = 1
    """How often the loss sees the examples of a rollout: they serve `rollout_batches` times
    `rollout_passes` optimizer steps, each on `batch.size` of them. The first pass keeps their
    order, later ones shuffle them."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self.config = config
        """The trainer's own section of the configuration."""
        self.tokenizer = tokenizer

    @abc.abstractmethod
    def example(self, row: Any) -> Example:
        """Return the tree of one row.

        Called before `setup`, in worker processes that have no accelerator. The result is cached;
        the cache is renewed when the sources of the trainer's package, or of a row format, change.
        """

    @abc.abstractmethod
    def setup(self, run: "Run") -> None:
        """Load the models: `self.policy = run.load("policy")`. Collective.

        Core also calls it on a second instance whose models have shapes and no values, to measure
        the memory of a step before it reads any weight.
        """

    @abc.abstractmethod
    def loss(self, batch: PackedBatch) -> Loss:
        """Return the sums of one micro-batch and the counts they are divided by.

        No means and no `.item()`: core divides by the counts of the whole step.
        """

    def survey(self, batch: PackedBatch) -> Mapping[str, Tensor]:
        """Return values per example [E, ...] or per answer [A, ...] of a micro-batch.

        Core calls it without gradient over the whole step, before the first `loss` of the step, and
        in evaluations too. Its micro-batches are larger than those of the loss. The values of
        all micro-batches and ranks are in `batch.step`, in the order of examples;
        `batch.step["examples"]` and `batch.step["answers"]` are the places of this micro-batch's
        own examples and answers among them.
        """
        return {}

    def needs_survey(self) -> bool:
        """Return whether core calls `survey`: by default, whether the class defines it."""
        return type(self).survey is not Trainer.survey

    def survey_examples(self, examples: Examples, draw: np.random.Generator) -> Packable:
        """Return the examples that `survey` sees: by default those of the loss.

        Another sequence of the same length is packed for the survey only; its i-th example counts
        for the i-th example of the data. `draw` is new in every epoch and the same on every rank;
        with a cached reference that knows the survey, the examples of the first epoch are those of
        every epoch. Called in threads too.
        """
        return examples

    def check_examples(self, examples: Examples) -> None:
        """Raise RLHFError for rows that the trainer cannot be run with. Called before `setup` with
        the rows to train on, and with the held-out ones if there are any."""

    def classifiers(self, config: Config) -> Sequence[Classifier]:
        """Return the classifiers that `setup` makes of the model of `config`, the whole
        configuration. A family without them is refused before rows are tokenised."""
        return ()

    def remarks(self, examples: Examples) -> Sequence[str]:
        """Return lines about the training rows that the run prints before its first step."""
        return ()

    def rollout(
        self, examples: Sequence[Example], step: int, seeds: Sequence[int]
    ) -> Sequence[Example]:
        """Return the examples that the loss sees in place of `examples`, one for each, in the same
        order. This is the hook of on-policy methods.

        Called in training with the rows of `rollout_batches` steps, before optimizer step `step`
        (from 0), and in evaluations after `step` steps with the held-out rows, where
        `engine.module.training` is False. `seeds` has a number for each example that decides what
        is drawn: new in every epoch, the same in every evaluation, on any number of ranks. Every
        rank gets all examples and must return the same ones. Collective.
        """
        return examples

    def draws(self, examples: Sequence[Example], seeds: Sequence[int]) -> Mapping[str, Any]:
        """Return the arguments with which `rollout` calls `Run.sample` for these examples and seeds
        in training, by name. With `rollouts.lag: 1`, core has these answers drawn a rollout
        earlier; trainers that do not define it are refused."""
        raise NotImplementedError

    def needs_rollout(self) -> bool:
        """Return whether core calls `rollout`: by default, whether the class defines it."""
        return type(self).rollout is not Trainer.rollout

    def rollout_shape(self, examples: Examples, most: int) -> Example:
        """Return an example of the size of the largest that `rollout` can make of any of
        `examples`, with any tokens, and with any numbers for all of its values: by default one
        answer to the longest prompt, `most` tokens together, which is `data.max_tokens`, with the
        values of the rows. Batches and memory are planned for it, and the positions of models are
        compared with it."""
        longest = examples[int(examples.prompt_lengths.argmax())]
        prompt = longest.prompt[: most - 1]
        size = most - len(prompt)
        blanks = {"example": 0.0, "answer": [0.0], "token": [[0.0] * size]}
        values = {name: blanks[kind] for name, kind in examples.value_kinds.items()}
        return attrs.evolve(longest, prompt=prompt, answers=[Answer([0] * size)], values=values)

    def score(self, batch: PackedBatch) -> Tensor:
        """Return the scores of answers that `train.samples` shows: per answer [A], or per token [T]
        with nan for tokens without one.

        Called in evaluations, without gradient, for held-out rows. A trainer that does not define
        it shows answers that the policy writes instead. Collective."""
        raise NotImplementedError

    def samples(self, number: int) -> Sequence[Mapping[str, Any]]:
        """Return up to `number` samples of the answers that `rollout` has written to the held-out
        rows of this evaluation, for `train.samples`: see `on_samples` for their keys.

        Those of rank 0 are shown. A trainer that does not define it shows answers that the policy
        writes to the first rows, or their scores."""
        raise NotImplementedError

    def derive(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        """Return metrics that are not a ratio of sums, such as F1, from the totals of a step or an
        evaluation: floats, and lists of floats for sums that have a dimension."""
        return {}

    def model_config(self, metrics: Mapping[str, float]) -> Mapping[str, Any]:
        """Return plain data to add to the exported model's config.json, such as how to use its
        scores. `metrics` are the newest of the run, those of evaluations as `eval/...`."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return what the trainer itself must keep in a checkpoint: plain data for JSON, the same
        on every rank."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""


@documented
@frozen
class Average:
    """A moving average of another parameter in `extra` of `Run.load`, not trained, in float32."""

    value: Tensor
    """First value."""
    of: str
    """The trained parameter."""
    share: float = field(validator=[validators.ge(0), validators.le(1)])
    """Its share in each move."""
    every: int = field(validator=validators.ge(1))
    """Optimizer steps between two moves."""


class Reference(Protocol):
    """The policy before its first step: log-probabilities in float32, without gradient."""

    def token_logprobs(self, batch: PackedBatch) -> Tensor:
        """Return the log-probability of each prediction of the batch [N]. Collective if sharded."""

    def answer_logprobs(self, batch: PackedBatch) -> Tensor:
        """Return the sum over the predictions of each answer [A]. Collective if sharded."""

    def __call__(self, batch: PackedBatch, readout: Readout) -> Mapping[str, Tensor]:
        """Run `readout` on the reference. Collective if sharded. Raises RLHFError in mode `cache`,
        which only holds log-probabilities of the data's own answers."""


@documented
class Run(Protocol):
    """What `Trainer.setup` may use: the configuration, the tokenizer, and models as engines."""

    config: Config
    """The whole configuration; the trainer's own section is `Trainer.config`."""
    tokenizer: Any
    """The tokenizer of transformers."""
    device: torch.device
    """The device of this rank."""
    steps: int
    """Number of optimizer steps of the whole schedule."""
    folder: Path | None
    """The run folder, in which rank 0 may write files of the trainer's own; None in a rehearsal."""
    examples: tuple[Examples, ...]
    """The tokenised rows: those to train on, then the held-out ones if there are any."""
    notes: list[str]
    """Lines that the run prints before its first step, such as what was chosen and why, or after
    the step in which they were added. Each begins with its subject, in 11 columns."""
    engine_metrics: dict[str, float]
    """What the generation engine has measured since a trainer, which reports it, has cleared it."""

    def load(
        self,
        role: str,
        *,
        model: ModelConfig | None = None,
        lora: bool = False,
        trained: bool = True,
        task: Literal["causal", "sequence", "token"] = "causal",
        labels: int | None = None,
        extra: Mapping[str, Tensor | Average] | None = None,
        dropout: bool = True,
        optim: OptimConfig | None = None,
        first_step: int = 0,
    ) -> Engine:
        """Load a model and return its engine. Collective.

        Every run trains the role `policy`. Other roles are trained too, such as a critic, or run
        without gradient with `trained=False`; each has a plan of its own. A trained model gets the
        gradient of the loss's terms of its `role` and a folder in checkpoints; all of them step
        together, by `optim` of the configuration or an `optim` of their own. `model/` is the
        policy, `model-ROLE/` another.

        By default the model is the one of the configuration, with its adapters; pass `model` for
        another, such as a teacher, and `lora` to give it new adapters as in the section `lora`, if
        the configuration has one. `task` is what its head predicts: the vocabulary, scores per
        answer, or scores per token; by default it has one of them per answer, or two per token;
        `labels` sets another number. With `dropout=False` the model's own dropout is removed.

        With a `first_step`, so many steps of the run leave the model as it is, whatever the loss
        has for it: no weight or state of its optimizer changes. Its learning rate follows its
        schedule over the steps after them.

        `extra` are parameters of the trainer by name, with their first values. A readout gets them
        as `head.extra[name]`. They are trained, sharded, saved and exported with the model, also
        with an adapter; matrices among them have weight decay. They may be averages.
        """

    def prepare(
        self,
        module: nn.Module,
        role: str,
        *,
        trained: bool = True,
        optim: OptimConfig | None = None,
    ) -> Engine:
        """Return an engine of any module, as `load` does of a language model. Collective.

        The module is the same on every rank, in any dtype: its weights get that of the
        configuration. The engine is called as the module is, and `engine.module` is the module. Its
        state is exported as model.safetensors.
        """

    def reference(
        self,
        mode: ReferenceMode = "auto",
        *,
        every: int | None = None,
        mix: float = 1.0,
        live: bool = False,
        survey: Callable[[Examples, np.random.Generator], Packable] | None = None,
    ) -> Reference:
        """Return the policy as it is before its first step; call it after `load("policy")`.
        Collective. Raises RLHFError for a mode that this configuration does not allow.

        `adapter` is the policy with its adapter off, `engine` a frozen second model, `cache`
        log-probabilities that are computed once and kept on disk; `auto` takes the cheapest. With
        `every` the reference moves to the share `mix` of the policy every `every` steps (TR-DPO,
        arXiv 2404.09656). `live` means that it is called with other tokens than those of the data,
        or with a readout, which a cache cannot answer.

        If `Trainer.survey` calls the reference on the examples of `survey_examples`, pass that
        method as `survey`. A cache then has their log-probabilities too, and the survey sees the
        same examples in every epoch.
        """

    def shape(self, role: str) -> ModelShape:
        """Return the size of a model that is loaded."""

    def limit_tokens(self, tokens: int) -> None:
        """Have every language model of the run predict, and answers consist of, only the first
        `tokens` tokens of its head; also those that are loaded later. The smallest limit counts."""

    def attach(
        self,
        name: str,
        model: ModelConfig,
        compute: Callable[[Engine, PackedBatch], Tensor],
        *,
        key: str,
        width: int | None = None,
    ) -> str:
        """Give the run's examples the value `name`, which the frozen `model` computes once for all
        their predictions. Return what was done, in words. Collective.

        `compute(engine, batch)` returns [N], or [N, width], in float32, without gradient. `loss`
        gets `batch.values[name]` per token, [T] or [T, width], nan where nothing is predicted.

        The values stay in the folder `name` of the cache, for runs with the same weights, rows and
        `key`, which says what else decides them. If none are missing, the model is not loaded; else
        it has the role `name`, and is released.
        """

    def sample(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int],
        max_new_tokens: int,
        temperature: float = 1.0,
        inputs: Sequence[Mapping[str, Any]] = (),
    ) -> list[Sample]:
        """Return an answer to each prompt (token ids), drawn from the engine's distribution at
        `temperature`; at 0 each token is the most likely one. In data with images, `inputs` has
        `prompt_inputs(example)` of the example of each prompt.

        An answer ends with a token that ends trained answers, after `max_new_tokens` tokens, or
        when prompt and answer together have `data.max_tokens` tokens or fill the model's table of
        positions, if it has one. It has at least one token.

        An answer depends only on its prompt and its seed, up to rounding. Collective: every rank
        passes the same prompts and gets all answers.
        """

    def read(
        self,
        examples: Sequence[Example],
        compute: Callable[[PackedBatch], Tensor],
        *,
        per: Literal["prediction", "answer"] = "prediction",
    ) -> list[list[Any]]:
        """Return for each of `examples` what `compute` returns of it, such as the values of a
        critic for a rollout: a list with one entry for each answer.

        `compute` gets micro-batches of at most `batch.tokens` tokens, without gradient and dropout.
        It returns one number per prediction [N] or, with `per="answer"`, per answer [A]. Per
        prediction an entry is an array with a number for each token of the answer, nan for tokens
        that are not predicted. As a value of an `Example`, both are what `loss` gets.

        Collective: every rank passes the same examples and computes its share of them.
        """

    def on_rank_zero(self, act: Callable[[], T], *, share: bool = True) -> T:
        """Return the result of `act` on rank 0, on every rank; with `share` False on rank 0 only,
        and None elsewhere. For what is called once, such as the reward functions of a rollout. An
        RLHFError is raised on every rank. Collective. A rehearsal of a step calls nothing and
        returns None."""

    def load_architecture(self, role: str = "policy", *, model: ModelConfig | None = None) -> Any:
        """Return transformers' configuration of the model of a role, without its weights. Raises
        RLHFError if it is not a causal language model."""

    def load_tokenizer(self, model: ModelConfig) -> Any:
        """Return the tokenizer of another model, such as a reward model that has one of its own,
        for `encode`."""
