"""The smallest real inputs of a run, and functions that run them, which the ranks of a test can
call."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import attrs
import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import rlhf_demo
from rlhf.commands.main import main
from rlhf.config.sections import Config
from rlhf.contract import checks
from rlhf.data.batch import PackedBatch
from rlhf.data.order import RunOrder, StepPlan, SurveyRows
from rlhf.engine import Mesh, StepOutcome
from rlhf.folder.run_folder import logged
from rlhf.hookspecs import hookimpl
from rlhf.launch.places import Marker
from rlhf.memory.estimate import CountedStep, count_step
from rlhf.memory.fit import StepFit
from rlhf.memory.rehearsal import largest, made_of
from rlhf.model.packed import PackedModel, PathName
from rlhf.plugin import BackendPlugin
from rlhf.registry.gateway import BackendGateway
from rlhf.registry.imports import load_object
from rlhf.request.reader import read_config
from rlhf.train import rank as rank_run
from rlhf.train import samples
from rlhf.train.context import RunContext
from rlhf.train.dataset import prepare_data
from rlhf.train.loop import Stepper, sum_gradients
from rlhf.train.rank import process_group, run_rank
from rlhf.train.rollout import Block
from rlhf.train.session import Session
from rlhf.train.set_up import set_up, step_fit
from rlhf.trainer import Sample
from rlhf_backend_torch import TorchEngine
from rlhf_devkit import scratch
from rlhf_devkit.curves import Metrics
from rlhf_devkit.gateways import build_gateways
from rlhf_devkit.plain import PlainBackend
from rlhf_devkit.waits import Wait, Waits

AMPLE_TOKENS = 1 << 20
"""A `batch.tokens` that holds any step of the tests."""
END_SCALE = 30.0
"""Factor on the embedding of EOS, which is tied to the head, in a model that ends its answers: its
logit then has a standard deviation of about 3, so that EOS is drawn at most lengths sometimes."""


SAMPLE_TOKENS = 24
"""Most tokens of a sample of an evaluation, in place of 256: a model with random weights seldom
ends one, which would take most of the time of a run."""


def make_model(folder: Path, *, seed: int = 0, ends_answers: bool = False) -> Path:
    """Write a Llama of two layers with random weights, and the demo's tokenizer with its chat
    template, into `folder` and return it.

    With `ends_answers` the answers that it writes end with EOS, at different lengths.
    """
    scratch.make(folder)
    config = LlamaConfig.from_pretrained(folder)
    for name, value in {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}.items():
        setattr(config, name, value)
    config.head_dim = 8
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    if ends_answers:
        with torch.no_grad():
            model.get_input_embeddings().weight[config.eos_token_id] *= END_SCALE
    model.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write `rows` as JSON lines and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def short_run(folder: Path, format: str) -> list[str]:
    """Write a model and the demo's rows in a row format into `folder`, and return the command line
    of a run of four steps of 8 rows, without `--output`."""
    rows = rlhf_demo.rows("arithmetic", "train", format)
    train = write_rows(folder / "train.jsonl", rows[:22])
    held_out = write_rows(folder / "eval.jsonl", rows[22:29])
    return [
        "--model", str(make_model(folder / "model")), "--model.dtype", "fp32",
        "--data.train", str(train), "--data.eval", str(held_out), "--data.workers", "0",
        "--batch.size", "8", "--batch.tokens", "512", "--optim.lr", "3e-3", "--train.steps", "4",
    ]  # fmt: skip


def run(
    trainer: str,
    words: Sequence[str],
    cache: str,
    plain: bool = False,
    observers: Mapping[str, object] = MappingProxyType({}),
    backend: tuple[str, BackendPlugin] | None = None,
) -> Metrics:
    """Run `rlhf run TRAINER WORDS` on this rank, through its backend or in plain torch, and return
    the lines of its metrics.jsonl. `backend` is the name and the record of one that need not be
    installed. Samples have at most 24 tokens. Raises AssertionError if a signal stopped the run."""
    os.environ["RLHF_CACHE"] = cache
    request = read_config(trainer, overrides=words, backend=backend)
    hooks: Any = PlainBackend() if plain else None
    if hooks is None and backend is not None:
        hooks = load_object(backend[1].hooks)()
    with patch.object(samples, "MAX_NEW_TOKENS", SAMPLE_TOKENS):
        folder, ended = run_rank(request, backend=hooks, observers=observers)
    assert ended != "signal", "the run was stopped by a signal"
    return logged(folder)


def run_without_room(trainer: str, words: Sequence[str], cache: str) -> Metrics:
    """Make a run as `run` does on ranks whose memory is not known, so that a backend with weights
    in shards gathers them for every forward of a generation."""
    with patch.object(rank_run, "process_group", _without_memory):
        return run(trainer, words, cache)


@contextmanager
def _without_memory(config: Config, hooks: BackendGateway) -> Iterator[Mesh]:
    with process_group(config, hooks) as mesh:
        yield attrs.evolve(mesh, memory=0)


def command(*words: str) -> None:
    """Run `rlhf WORDS` in this process. Raises AssertionError if its exit code is not 0."""
    code = main(list(words))
    assert code == 0, f"rlhf {' '.join(words)} ended with exit code {code}"


def longest_example(trainer: str, words: Sequence[str], cache: str, *, num_steps: int) -> int:
    """Return the tokens of the largest tree of the rows, and of what a rollout makes of them in
    `num_steps` steps: the least `batch.tokens` with which these rows can be run."""
    os.environ["RLHF_CACHE"] = cache
    data = prepare_data(read_config(trainer, overrides=words))
    longest = max(int(part.lengths.max()) for part in (data.train, data.eval) if part)
    if data.trainer.needs_rollout():
        arguments = [*words, "--batch.tokens", str(AMPLE_TOKENS)]
        _, session, _ = in_plain_torch(trainer, arguments, cache)
        moments = _steps(session, num_steps)
        longest = max(longest, *(moment.largest for moment in moments))
        session.eval()
        order = session.eval_order
        assert order is not None, "the rows of the tests are partly held out"
        assert session.rollouts is not None, "the trainer has a rollout"
        for number in range(order.steps_per_epoch):
            plan, _ = session.rollouts.held_out(order, number, step=num_steps)
            longest = max(longest, int(plan.lengths.max()))
    return longest


@frozen
class Moment:
    """One optimizer step in plain torch."""

    loss: float
    gradients: dict[str, Tensor] = field(repr=False)
    """Of every trained parameter by role and name, before clipping."""
    largest: int = 0
    """Tokens of the step's largest tree."""


def first_steps(
    trainer: str,
    words: Sequence[str],
    cache: str,
    *,
    num_steps: int,
    path: PathName | None = None,
    one_by_one: bool = False,
) -> list[Moment]:
    """Take the first steps of a run in plain torch, which writes nothing.

    `path` is how every engine runs packed batches instead of the way that the probe found; with
    `one_by_one` every example is a micro-batch.
    """
    backend, session, _ = in_plain_torch(trainer, words, cache)
    packed: list[Any] = [e.module for e in backend.engines if isinstance(e.module, PackedModel)]
    for module in packed:
        module.path = path or module.path
    return _steps(session, num_steps, one_by_one=one_by_one)


def waits_of_step(trainer: str, words: Sequence[str], cache: str) -> tuple[int, list[Wait]]:
    """Return how many micro-batches the second step of a run has in plain torch, and where the host
    would wait for an accelerator from packing them to the last backward pass."""
    _, session, _ = in_plain_torch(trainer, words, cache)
    _steps(session, 1)
    moment = checks.Moment("step 2", session.train_order.examples)
    with Waits() as waits:
        if session.rollouts is not None:
            plan, packed = session.rollouts.step(1)
        else:
            plan, packed = _batches(session.train_order, session.train_order.step(1))
        batches, totals = session.survey.batches(plan, packed, session.engine.device, moment)
        sum_gradients(session, batches, totals, moment, session.trained.keys())
    return len(batches), waits.found


def rollouts(
    trainer: str, words: Sequence[str], cache: str, *, num_steps: int
) -> tuple[int, list[Sample]]:
    """Return how many rollouts the first steps of a run in plain torch have, and the answers that
    they sample."""
    sampled: list[Sample] = []
    sample = RunContext.sample

    def keep(*arguments: Any, **options: Any) -> list[Sample]:
        answers = sample(*arguments, **options)
        sampled.extend(answers)
        return answers

    with patch.object(RunContext, "sample", keep):
        _, session, _ = in_plain_torch(trainer, words, cache)
        _steps(session, num_steps)
    if session.rollouts is None:
        return 0, []
    order, own = session.train_order, session.trainer
    return len({Block.of(number, order, own).first for number in range(num_steps)}), sampled


def step_memory(
    trainer: str, words: Sequence[str], cache: str
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the bytes alive when backward begins and at the peak of the run's largest micro-batch:
    as estimated without values, and as measured in plain torch."""
    backend, session, step_fit = in_plain_torch(trainer, words, cache)
    estimate = step_fit.estimate
    assert estimate is not None, step_fit.rehearsed
    session.train()
    made = made_of(session.trainer, session.train_order)
    most = largest(session.train_order, session.record.steps, made=made)
    modules = [engine.module for engine in backend.engines]
    rehearsed = (estimate.step.activations, estimate.step_peak)
    steps = [
        count_step(session.trainer, batch, modules, surveyed=most.survey)
        for batch in (most.loss, *most.others)
    ]
    measured = max(steps, key=CountedStep.peak)
    return rehearsed, (measured.activations, measured.peak())


def in_plain_torch(
    trainer: str, words: Sequence[str], cache: str
) -> tuple["KeepingBackend", Session, StepFit]:
    """Set up a run that writes nothing, up to its first step, and what estimates that step."""
    os.environ["RLHF_CACHE"] = cache
    request = read_config(trainer, overrides=words)
    backend = KeepingBackend()
    hooks, observers = build_gateways(backend)
    mesh = hooks.setup_mesh(config=request.config)
    data = prepare_data(request)
    output = Path(request.config.output or "")
    session = set_up(request, data, mesh, hooks, observers, output, None, Marker(None, 0))
    return backend, session, step_fit(request.config, data, mesh, hooks)


def _steps(session: Session, num_steps: int, *, one_by_one: bool = False) -> list[Moment]:
    session.train()
    stepper = Stepper(session)
    return [_moment(session, stepper, number, one_by_one=one_by_one) for number in range(num_steps)]


def _moment(session: Session, stepper: Stepper, number: int, *, one_by_one: bool) -> Moment:
    if session.rollouts is not None:
        plan, batches = session.rollouts.step(number)
    else:
        order = session.train_order
        plan, batches = _batches(order, order.step(number), one_by_one=one_by_one)
    report = stepper.take(plan, batches).report
    assert report is not None
    engines: dict[str, Any] = {role: model.engine for role, model in session.trained.items()}
    gradients = {
        f"{role} {name}": gradient
        for role, engine in engines.items()
        for name, gradient in engine.gradients.items()
    }
    trees = [prompt + sum(answers) for batch in batches for prompt, answers in batch.spans]
    loss = report.read(session.trainer.derive)["loss"]
    return Moment(loss, gradients, max(trees, default=0))


def _batches(
    order: RunOrder, plan: StepPlan, *, one_by_one: bool = False
) -> tuple[StepPlan, list[PackedBatch]]:
    if one_by_one:
        each = [np.array([row]) for row in plan.rows]
        seen = [SurveyRows(plan.epoch, rows) for rows in each] if plan.survey else []
        plan = attrs.evolve(plan, micro=each, survey=seen)
    return plan, [*(order[rows] for rows in plan.survey), *(order[rows] for rows in plan.micro)]


class KeepingEngine(TorchEngine):
    """A plain engine that keeps the gradients of its last step."""

    gradients: Mapping[str, Tensor] = MappingProxyType({})

    def step(self) -> StepOutcome:
        """Take the plain engine's step."""
        named = self.module.named_parameters()
        self.gradients = {
            name: weight.grad.clone() for name, weight in named if weight.grad is not None
        }
        return super().step()


class KeepingBackend(PlainBackend):
    """A plain backend that keeps its engines, which keep their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.engines: list[KeepingEngine] = []

    @hookimpl
    def prepare(
        self, model: Any, optimizer: Any, schedule: Any, role: Any, plan: Any, mesh: Any
    ) -> TorchEngine:
        if optimizer is None:
            model.requires_grad_(False).eval()
        engine = KeepingEngine(model, optimizer, schedule, role=role, plan=plan, mesh=mesh)
        self.engines.append(engine)
        return engine
