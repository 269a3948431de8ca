"""What the author of a trainer can mend is one sentence that names the trainer and the method."""

import contextlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sft_runs
from rlhf.commands.main import main
from rlhf.contract.calls import Contract
from rlhf.contract.checks import Moment, check_names, check_rollout, check_setup
from rlhf.data.batch import PackedBatch
from rlhf.data.example import Answer, Example
from rlhf.data.mapping import check_example
from rlhf.engine import Mesh
from rlhf.errors import RLHFError, place_of
from rlhf.hookspecs import CORE_METRICS
from rlhf.readouts import token_logprobs
from rlhf.request.reader import read_config
from rlhf.train.rank import run_rank
from rlhf.train.session import Session
from rlhf.trainer import Loss, Run, Term, Trainer
from rlhf_devkit import Ranks
from rlhf_devkit.tiny import in_plain_torch
from sft_runs import Inputs


class Mine(Trainer):
    """A trainer whose loss and survey are given."""

    row_format = "demonstration"

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self.returns: Callable[[Any, PackedBatch], Any] = lambda trainer, batch: None

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Run) -> None:
        self.policy = run.load("policy")

    def loss(self, batch: PackedBatch) -> Loss:
        return self.returns(self, batch)

    def survey(self, batch: PackedBatch) -> Any:
        return self.returns(self, batch)

    def logprobs(self, batch: PackedBatch) -> Tensor:
        return self.policy(batch, token_logprobs)["logprobs"]


@pytest.fixture(scope="module")
def session(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A run up to its first step."""
    before = os.environ.get("RLHF_CACHE")
    words = sft_runs.words(inputs, tmp_path_factory.mktemp("contract") / "run")
    _, session, _ = in_plain_torch("sft", words, str(inputs.cache))
    yield session
    os.environ.pop("RLHF_CACHE", None)
    if before is not None:
        os.environ["RLHF_CACHE"] = before


def contract(session: Session, returns: Callable[[Any, PackedBatch], Any]) -> Contract:
    trainer = Mine(None, None)
    trainer.policy, trainer.returns = session.engine, returns
    return Contract(trainer, session.trained)


def first_batch(session: Session) -> PackedBatch:
    return session.train_order[session.train_order.step(0).rows]


def term(trainer: Mine, batch: PackedBatch) -> Term:
    return Term(-trainer.logprobs(batch).sum(), per="tokens")


def weights(trainer: Mine) -> Tensor:
    return trainer.policy.module.causal.get_input_embeddings().weight


def alone(trainer: Mine, batch: PackedBatch) -> Tensor:
    return trainer.policy.module.causal(input_ids=batch.tokens[None]).logits


def leaked(trainer: Mine, batch: PackedBatch) -> Tensor:
    found = []

    def readout(hidden: Tensor, head: Any, batch: PackedBatch) -> dict[str, Tensor]:
        found.append(head.logits(hidden))
        return {}

    trainer.policy(batch, readout)
    return found[0]


TOTALS = {"below": -2.0, "answers": 4.0, "examples": 4.0, "tokens": 40.0}
LOSSES: dict[str, tuple[Callable[[Any, PackedBatch], Any], str]] = {
    "a term per what nobody counts": (
        lambda trainer, batch: Loss((Term(-trainer.logprobs(batch).sum(), per="rows"),)),
        "Mine.loss() returned a term 0 per 'rows', which is not a known count; use one of "
        "answers, below, examples, tokens, or a name that survey() returns",
    ),
    "a metric per what nobody counts": (
        lambda trainer, batch: Loss(
            (term(trainer, batch),),
            {"least": (torch.tensor(1.0), "min"), "right": (torch.tensor(1.0), "pairs")},
        ),
        "Mine.loss() returned the metric 'right' per 'pairs', which is not a known count; use one "
        "of answers, below, examples, tokens, or a name that survey() returns",
    ),
    "a term per a count below 0": (
        lambda trainer, batch: Loss((Term(-trainer.logprobs(batch).sum(), per="below"),)),
        "Mine.loss() returned a term 0 per 'below', which sums up to -2 over the step; a count "
        "cannot be negative",
    ),
    "nothing": (
        lambda trainer, batch: None,
        'Mine.loss() returned NoneType instead of a Loss; return Loss((Term(sum, per="tokens"),))',
    ),
    "a float": (
        lambda trainer, batch: 1.0,
        'Mine.loss() returned float instead of a Loss; return Loss((Term(sum, per="tokens"),))',
    ),
    "a term without a comma": (
        lambda trainer, batch: Loss(term(trainer, batch)),  # type: ignore[arg-type]
        "Mine.loss() returned a Loss whose terms are not a tuple of Term",
    ),
    "no terms": (
        lambda trainer, batch: Loss(()),
        "Mine.loss() returned a Loss without terms",
    ),
    "a sum that is a float": (
        lambda trainer, batch: Loss((Term(1.0, per="tokens"),)),  # type: ignore[arg-type]
        "Mine.loss() returned a term 0 whose sum is float; return a tensor",
    ),
    "a vector": (
        lambda trainer, batch: Loss((Term(trainer.logprobs(batch)[:3], per="tokens"),)),
        "Mine.loss() returned a term 0 whose sum has shape [3]; sum it to a scalar",
    ),
    "a detached sum": (
        lambda trainer, batch: Loss((Term(trainer.logprobs(batch).sum().detach(), per="tokens"),)),
        "Mine.loss() returned a term 0 whose sum has no gradient; compute it from what an engine "
        "returned, and do not detach it",
    ),
    "a metric that is text": (
        lambda trainer, batch: Loss((term(trainer, batch),), {"kl": "0.5"}),  # type: ignore[dict-item]
        "Mine.loss() returned the metric 'kl' as str; return a pair (sum, \"tokens\"), or a number",
    ),
    "a metric's sum that is a float": (
        lambda trainer, batch: Loss(
            (term(trainer, batch),),
            {"kl": (0.5, "tokens")},  # type: ignore[dict-item]
        ),
        "Mine.loss() returned a metric 'kl' whose sum is float; return a tensor",
    ),
    "a metric that is a vector": (
        lambda trainer, batch: Loss((term(trainer, batch),), {"kl": (torch.zeros(2), "tokens")}),
        "Mine.loss() returned a metric 'kl' whose sum has shape [2]; sum it to a scalar",
    ),
    "a term of no model": (
        lambda trainer, batch: Loss((Term(trainer.logprobs(batch).sum(), "tokens", role="judge"),)),
        "Mine.loss() returned terms for judge, but the run trains policy; return a term for each "
        "of them",
    ),
    "weights outside of a forward": (
        lambda trainer, batch: Loss(
            (term(trainer, batch), Term(weights(trainer).square().sum(), per="examples"))
        ),
        "Mine.loss() reads the weight model.model.embed_tokens.weight of the policy outside of the "
        "engine's forward, where it is sharded at ZeRO stage 3; read it in a readout",
    ),
    "the model without its engine": (
        lambda trainer, batch: Loss((Term(alone(trainer, batch).sum(), per="tokens"),)),
        "Mine.loss() calls the model of the policy directly, without its engine: examples would "
        "attend to each other, and at ZeRO stage 3 the weights are sharded; call the engine with a "
        "readout",
    ),
    "the head taken out of a readout": (
        lambda trainer, batch: Loss((Term(leaked(trainer, batch).sum(), per="tokens"),)),
        "of the policy outside of the engine's forward, where it is sharded at ZeRO stage 3; read "
        "it in a readout",
    ),
}


@pytest.mark.parametrize("fault", LOSSES)
def test_a_loss_that_core_cannot_use_is_refused(fault: str, session: Session) -> None:
    returns, text = LOSSES[fault]
    with pytest.raises(RLHFError) as error:
        contract(session, returns).loss(first_batch(session), TOTALS)
    assert str(error.value).endswith(text)
    assert fault.startswith("the head") or str(error.value) == text


@pytest.mark.parametrize("name", [*sorted(CORE_METRICS), "router_loss_critic", "term 0"])
def test_a_metric_with_a_name_of_core_is_refused(name: str, session: Session) -> None:
    def returns(trainer: Mine, batch: PackedBatch) -> Loss:
        return Loss((term(trainer, batch),), {name: (torch.tensor(1.0), "tokens")})

    with pytest.raises(RLHFError) as error:
        contract(session, returns).loss(first_batch(session), TOTALS)
    assert str(error.value) == (
        f"Mine.loss() returned a metric {name!r}, a name that core uses itself; rename it"
    )


def test_metrics_are_detached_so_that_their_graph_ends_with_the_loss(session: Session) -> None:
    def returns(trainer: Mine, batch: PackedBatch) -> Loss:
        return Loss((term(trainer, batch),), {"sum": (trainer.logprobs(batch).sum(), "tokens")})

    loss = contract(session, returns).loss(first_batch(session), TOTALS)
    assert loss.metrics["sum"][0].grad_fn is None


SURVEYS: dict[str, tuple[Any, str]] = {
    "nothing": (None, "Mine.survey() returned NoneType instead of a dictionary of tensors"),
    "a float": ({"kl": 0.5}, "Mine.survey() returned 'kl' as float; return a tensor"),
    "core's name": (
        {"answers": torch.zeros(4)},
        "Mine.survey() returned 'answers', a name that core uses itself; rename it",
    ),
    "a scalar": (
        {"kl": torch.tensor(0.5)},
        "Mine.survey() returned 'kl' of shape [] for 4 examples with 4 answers; its first "
        "dimension must be one of these",
    ),
    "too many": (
        {"kl": torch.zeros(7)},
        "Mine.survey() returned 'kl' of shape [7] for 4 examples with 4 answers; its first "
        "dimension must be one of these",
    ),
}


@pytest.mark.parametrize("fault", SURVEYS)
def test_a_survey_that_core_cannot_use_is_refused(fault: str, session: Session) -> None:
    values, text = SURVEYS[fault]
    with pytest.raises(RLHFError) as error:
        contract(session, lambda trainer, batch: values).survey(first_batch(session))
    assert str(error.value) == text


def test_a_survey_that_calls_the_model_without_its_engine_is_refused(session: Session) -> None:
    checked = contract(session, lambda trainer, batch: {"x": alone(trainer, batch)[0, :4, 0]})
    with pytest.raises(RLHFError) as error, torch.no_grad():
        checked.survey(first_batch(session))
    assert str(error.value) == (
        "Mine.survey() calls the model of the policy directly, without its engine: examples would "
        "attend to each other, and at ZeRO stage 3 the weights are sharded; call the engine with a "
        "readout"
    )


def test_calls_of_the_models_are_watched_once_and_leave_no_hook(session: Session) -> None:
    module = session.engine.module
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    before = [len(each) for each in hooks]
    checked = contract(session, lambda trainer, batch: Loss((term(trainer, batch),)))
    first, second = (checked.loss(first_batch(session), TOTALS) for _ in range(2))
    assert torch.equal(first.terms[0].sum, second.terms[0].sum)
    assert [len(each) for each in hooks] == before


def test_an_evaluation_needs_no_gradient(session: Session) -> None:
    checked = contract(session, lambda trainer, batch: Loss((term(trainer, batch),)))
    with torch.no_grad():
        assert not checked.loss(first_batch(session), TOTALS).terms[0].sum.requires_grad


def test_parameters_that_no_optimizer_trains_are_refused(session: Session) -> None:
    trainer = Mine(None, None)
    trainer.policy = session.engine
    check_setup(trainer, session.trained)
    for value, text in (
        (nn.Parameter(torch.zeros(2)), "Mine.own is an nn.Parameter that no optimizer trains; pass "
         "it to run.load() as `extra`"),
        ([nn.Linear(2, 2)], "Mine.own is a Linear that no optimizer trains; pass it to "
         "run.prepare()"),
    ):  # fmt: skip
        trainer.own = value  # type: ignore[attr-defined]
        with pytest.raises(RLHFError) as error:
            check_setup(trainer, session.trained)
        assert str(error.value) == text
    trainer.own = [nn.Linear(2, 2).requires_grad_(False)]  # type: ignore[attr-defined]
    check_setup(trainer, session.trained)
    with pytest.raises(RLHFError) as error:
        check_setup(trainer, {})
    assert str(error.value) == "Mine.setup() loads no policy; call run.load('policy')"


class NoPolicy(Mine):
    def setup(self, run: Run) -> None:
        self.policy = run.load("model")


class TwoPolicies(Mine):
    def setup(self, run: Run) -> None:
        self.policy = run.load("policy")
        run.load("policy")


class FrozenPolicy(Mine):
    def setup(self, run: Run) -> None:
        self.policy = run.load("policy", trained=False)


class EarlyReference(Mine):
    def setup(self, run: Run) -> None:
        self.reference = run.reference("engine")
        self.policy = run.load("policy")


class Penalty(Mine):
    def setup(self, run: Run) -> None:
        self.policy = run.load("policy")
        self.returns = LOSSES["weights outside of a forward"][0]

    def needs_survey(self) -> bool:
        return False


SETUPS = {
    "NoPolicy": "NoPolicy.setup() loads no policy; call run.load('policy')",
    "TwoPolicies": "setup() loads the role 'policy' twice; each model has its own role",
    "FrozenPolicy": "setup() loads the policy with trained=False; choose another role",
    "EarlyReference": "setup() calls run.reference() before run.load('policy'); swap them",
    "Penalty": "Penalty.loss() reads the weight model.model.embed_tokens.weight of the policy",
}


def run(trainer: str, words: list[str], cache: str) -> None:
    """A run of a trainer of this file under SFT's name and section."""
    os.environ["RLHF_CACHE"] = cache
    request = read_config("sft", overrides=words)
    plugin = attrs.evolve(request.plugin, trainer=f"{__name__}:{trainer}")
    run_rank(attrs.evolve(request, plugin=plugin))


@pytest.mark.parametrize("trainer", SETUPS)
def test_a_run_of_an_invalid_trainer_ends_with_the_error(
    trainer: str, inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    stage = ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0")
    words = sft_runs.words(inputs, tmp_path / "run", *(stage if trainer == "Penalty" else ()))
    (error,) = one.errors(run, trainer, words, str(inputs.cache))
    assert error.startswith(SETUPS[trainer])


GOOD = [Example([5], [Answer([7, 8])], {"reward": [0.5]}), Example([6], [Answer([9])])]
NAMED = "step 3, rows.jsonl line 2: Mine.rollout() returned "
NUMBERS = "; return a finite number or a list of them"
ROLLOUTS: dict[str, tuple[Any, str]] = {
    "nothing": (None, "step 3: Mine.rollout() returned NoneType for 2 rows"),
    "fewer": (GOOD[:1], "step 3: Mine.rollout() returned 1 example for 2 rows"),
    "no example": ([GOOD[0], [7, 8]], f"{NAMED}list instead of an Example"),
    "no answers": ([GOOD[0], Example([5], [])], f"{NAMED}an Example without answers"),
    "no tokens": (
        [Example([5], [Answer([7]), Answer([])]), GOOD[1]],
        "step 3, rows.jsonl line 8: Mine.rollout() returned an answer without tokens",
    ),
    "too many values": (
        [GOOD[0], Example([5], [Answer([7])], {"reward": [0.5, 0.5]})],
        f"{NAMED}2 values 'reward' for 1 answer",
    ),
} | {
    f"a reward of {shown}": (
        [GOOD[0], Example([5], [Answer([7])], {"reward": value})],
        f"{NAMED}{shown} as the value 'reward'{NUMBERS}",
    )
    for value, shown in (
        (None, "None"),
        ([None], "[None]"),
        ("good", "'good'"),
        (["good"], "['good']"),
        (float("nan"), "nan"),
        ([float("nan")], "[nan]"),
        (np.array([np.inf]), "array([inf])"),
        ([[0.5, None]], "[[0.5, None]]"),
        ({"score": 1.0}, "{'score': 1.0}"),
        (torch.tensor(0.5), "tensor(0.5000)"),
        ([torch.tensor(0.5)], "[tensor(0.5000)]"),
    )
}


class Rows(list[Example]):
    """Examples with names."""

    def name(self, number: int) -> str:
        return f"rows.jsonl line {number + 1}"

    def names(self, numbers: Iterable[int]) -> str:
        return ", ".join(map(self.name, numbers))


def moment(when: str = "step 3") -> Moment:
    examples: Any = Rows()
    return Moment(when, examples)


@pytest.mark.parametrize("fault", ROLLOUTS)
def test_a_rollout_that_core_cannot_use_is_refused(fault: str) -> None:
    examples, text = ROLLOUTS[fault]
    with pytest.raises(RLHFError) as error:
        check_rollout(examples, Mine(None, None), moment(), [7, 1], Mesh())
    assert str(error.value) == text
    check_rollout(GOOD, Mine(None, None), moment(), [7, 1], Mesh())


@pytest.mark.parametrize(
    "value",
    [
        1,
        0.5,
        np.float32(0.5),
        [0.5],
        np.array([0.5]),
        [[0.5, np.nan]],
        np.array([[0.5, np.nan]]),
        [torch.tensor([0.5, 1.0])],
    ],
)
def test_numbers_of_any_library_are_values(value: Any) -> None:
    check_example(Example([5], [Answer([7, 8])], {"reward": value}), "Mine.rollout()")


@pytest.mark.parametrize("method", ["survey", "loss"])
def test_an_error_in_a_method_is_noted_with_the_step_and_its_rows(
    method: str, session: Session
) -> None:
    mine = contract(session, lambda trainer, batch: 1 / 0)
    call = {"survey": mine.survey, "loss": lambda *at: mine.loss(at[0], TOTALS, at[1])}[method]
    batch = first_batch(session)
    for rows, names in (((0, 4), "rows.jsonl line 1, rows.jsonl line 5"), ((), "no rows")):
        with pytest.raises(ZeroDivisionError) as error:
            call(attrs.evolve(batch, rows=rows), moment("the evaluation after step 4"))
        assert place_of(error.value) == (
            f"Mine.{method}() failed in the evaluation after step 4 with {names}"
        )


class Raising(Mine):
    """Fails where a row, a rollout or a score is asked for."""

    fails = "rollout"

    def example(self, row: Any) -> Example:
        if self.fails == "example":
            raise KeyError("reward")
        return super().example(row)

    def rollout(self, examples: Any, step: int, seeds: Any) -> Any:
        if step:
            [1.0, 2.0].index(3.0)
        return examples

    def loss(self, batch: PackedBatch) -> Loss:
        return Loss((term(self, batch),))

    survey = Trainer.survey


class RaisingExample(Raising):
    fails = "example"


@pytest.mark.parametrize(
    ("trainer", "line"),
    [
        (
            "Raising",
            r"Raising\.rollout\(\) failed in step 2 with (ROWS line \d+, ){3}ROWS line \d+: "
            r"ValueError: 3\.0 is not in list",
        ),
        (
            "RaisingExample",
            r"RaisingExample\.example\(\) failed with ROWS line 1: KeyError: 'reward'",
        ),
    ],
)
def test_the_command_prints_where_a_method_has_failed_before_the_traceback(
    trainer: str, line: str, inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    words = ["run", f"{__file__}:{trainer}", *sft_runs.words(inputs, tmp_path / "run")]
    ((printed, kind),) = one.run(failed, words, str(inputs.cache))
    assert re.fullmatch(f"error: {line}\n".replace("ROWS", str(inputs.train)), printed)
    assert f": {kind}: " in line
    if trainer == "Raising":
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert f"error: {summary['error']}\n" == printed.replace("ValueError: ", "")


def failed(words: list[str], cache: str) -> tuple[str, str]:
    """Run a command that fails with a traceback; returns what it prints as an error, and the type
    of the error."""
    os.environ["RLHF_CACHE"] = cache
    with contextlib.redirect_stderr(io.StringIO()) as text:
        try:
            main(words)
        except (ValueError, KeyError) as error:
            return text.getvalue(), type(error).__name__
    raise AssertionError("the command has not failed")


def on_two_ranks(differ: bool) -> list[str]:
    """What is refused of examples and names that differ between the ranks, or do not."""
    rank = torch.distributed.get_rank()
    mesh, trainer = Mesh(rank=rank, world=2), Mine(None, None)
    reward = 0.5 + rank * differ
    examples = [attrs.evolve(GOOD[0], values={"reward": [reward]}), GOOD[1]]
    names: Sequence[dict[str, Any]] = [{"kl": 0}, {"margin": 0} if differ and rank else {"kl": 0}]
    texts = []
    for check in (
        lambda: check_rollout(examples, trainer, moment("step 4"), [7, 1], mesh),
        lambda: check_names(names, mesh, trainer),
    ):
        try:
            check()
        except RLHFError as error:
            texts.append(str(error))
    return texts


def test_a_difference_between_ranks_is_an_error_on_every_rank(two: Ranks) -> None:
    assert two.run(on_two_ranks, False) == [[], []]
    assert two.run(on_two_ranks, True) == [[
        "step 4: Mine.rollout() returned other examples on rank 1 than on rank 0; return the same "
        "on every rank, with random numbers that depend on the step only",
        "Mine.survey() must return the same names for every micro-batch on all ranks, also for one "
        "without rows, but returned ['kl'] and ['margin']",
    ]] * 2  # fmt: skip
