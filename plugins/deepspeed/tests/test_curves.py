"""The same curve at every stage, on one rank and two, and no step that does harm: real DeepSpeed on
gloo."""

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine

from rlhf_devkit.plain import PlainBackend
from rlhf_devkit.problem import Case, configure, follow, whole_weights
from rlhf_optim import RoundedAdamW
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig
from rlhf_plugin_deepspeed.engine import TrainingEngine

LAYOUTS = (
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    # Norms and biases stay whole on every rank.
    {"stage": 3, "persistence_threshold": 40},
    {"preset": "zero1_offload"},
    {"preset": "zero2_offload"},
    {"preset": "zero3", "offload_optimizer": True, "persistence_threshold": 0},
    {"preset": "zero3_offload", "persistence_threshold": 0},
    {"stage": 3, "offload_optimizer": True, "offload_ratio": 0.5, "persistence_threshold": 0},
    {
        "stage": 3,
        "hpz_partition_size": 2,
        "persistence_threshold": 40,
        "config": {
            "zero_optimization": {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
        },
    },
)
STAGES = LAYOUTS[:4]
EXACT = {"rel": 1e-5}


def run(case):
    """The outcome and the final weights, on whichever rank this is."""
    backend = DeepSpeedBackend()
    outcome, engine, mesh = follow(backend, case)
    weights = whole_weights(DeepSpeedBackend(), engine)
    backend.close_mesh(mesh)
    return outcome, weights


def run_in_fp16(case):
    """As `run`, with the CPU taken for an accelerator that has fp16."""
    get_accelerator().is_fp16_supported = lambda: True
    try:
        return run(case)
    finally:
        del get_accelerator().is_fp16_supported


def layout(**settings):
    return configure(DeepSpeedConfig(**settings))


@pytest.fixture(scope="module")
def plain():
    """The curve in plain torch on one process, with clipping active."""
    return follow(PlainBackend(), Case(config=configure()))[0]


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_two_ranks_follow_the_plain_curve_at_every_stage(pair, plain, settings, micro_batches):
    case = Case(config=layout(**settings), micro_batches=micro_batches)
    for outcome, _ in pair.run(run, case):
        assert outcome.losses == pytest.approx(plain.losses, **EXACT)
        assert outcome.norms == pytest.approx(plain.norms, **EXACT)
        assert outcome.rates == plain.rates
        assert all(outcome.moved)


WITHOUT_SPEED = [
    *((layout, "fp32") for layout in (STAGES[1], STAGES[3])),
    *((layout, "bf16") for layout in STAGES[2:]),
    *(
        pytest.param(layout, "fp32", marks=pytest.mark.matrix)
        for layout in (STAGES[1], *LAYOUTS[4:])
    ),
]


@pytest.mark.parametrize(("settings", "states"), WITHOUT_SPEED, ids=str)
def test_patches_for_speed_do_not_change_the_curve(pair, plain, settings, states):
    config = configure(
        DeepSpeedConfig(patches="correctness", **settings), dtype=states, states=states
    )
    rel = 1e-5 if states == "fp32" else 1e-2
    for outcome, _ in pair.run(run, Case(config=config, micro_batches=2)):
        assert outcome.losses == pytest.approx(plain.losses, rel=rel)
        assert outcome.norms == pytest.approx(plain.norms, rel=3 * rel)


@pytest.mark.matrix
# One rank has no second copy.
@pytest.mark.parametrize("settings", LAYOUTS[:-1], ids=str)
def test_one_rank_in_four_micro_batches_follows_the_plain_curve(single, plain, settings):
    ((outcome, _),) = single.run(run, Case(config=layout(**settings), micro_batches=4))
    assert outcome.losses == pytest.approx(plain.losses, **EXACT)
    assert outcome.norms == pytest.approx(plain.norms, **EXACT)


@pytest.mark.parametrize("settings", STAGES, ids=str)
def test_a_loss_may_run_the_model_twice_before_backward(pair, plain, settings):
    case = Case(config=layout(**settings), micro_batches=2, passes=2)
    for outcome, _ in pair.run(run, case):
        assert outcome.losses == pytest.approx(plain.losses, **EXACT)
        assert outcome.norms == pytest.approx(plain.norms, **EXACT)


@pytest.mark.parametrize("settings", STAGES, ids=str)
def test_without_clipping_the_norm_is_still_reported(pair, settings):
    plain = follow(PlainBackend(), Case(config=configure(clip=0.0), steps=2))[0]
    case = Case(config=configure(DeepSpeedConfig(**settings), clip=0.0), steps=2)
    outcome, _ = pair.run(run, case)[0]
    assert outcome.norms == pytest.approx(plain.norms, **EXACT)
    assert outcome.losses == pytest.approx(plain.losses, **EXACT)


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_bf16_keeps_fp32_masters_and_takes_no_extra_step(pair, plain, settings):
    config = configure(DeepSpeedConfig(**settings), dtype="bf16")
    outcome, weights = pair.run(run, Case(config=config))[0]
    assert outcome.losses == pytest.approx(plain.losses, rel=5e-3)
    assert outcome.norms == pytest.approx(plain.norms, rel=1e-2)
    assert {value.dtype for name, value in weights.items() if "scale" not in name} == {
        torch.bfloat16
    }


@pytest.mark.parametrize(
    "settings",
    [
        *(*STAGES, *LAYOUTS[5:6]),
        *(
            pytest.param(settings, marks=pytest.mark.matrix)
            for settings in (LAYOUTS[4], *LAYOUTS[6:])
        ),
    ],
    ids=str,
)
def test_the_scaler_of_fp16_skips_then_follows_the_curve(pair, settings):
    config = configure(DeepSpeedConfig(**settings), dtype="fp16")
    plain = follow(PlainBackend(), Case(config=configure(), steps=12))[0]
    outcome, _ = pair.run(run_in_fp16, Case(config=config, steps=12))[0]
    assert outcome.skipped[0]
    assert outcome.losses[0] == pytest.approx(plain.losses[0], rel=1e-2)
    first = outcome.moved.index(True)
    assert outcome.moved[-1]
    assert outcome.skipped == [not moved for moved in outcome.moved]
    # The rate follows the step's number, whatever the scaler did.
    assert outcome.rates == plain.rates
    reference = follow(PlainBackend(), Case(config=configure(), steps=first + 1, first=first))[0]
    assert outcome.norms[first] == pytest.approx(reference.norms[-1], rel=1e-2)


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.matrix), "bf16"])
@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_a_gradient_of_nan_on_one_rank_moves_no_weight(pair, settings, dtype):
    config = configure(DeepSpeedConfig(**settings), dtype=dtype)
    before = pair.run(run, Case(config=config, steps=1))[0][1]
    for outcome, after in pair.run(run, Case(config=config, steps=2, poison=(1, 1))):
        assert outcome.moved == [True, False]
        assert outcome.skipped == [False, False]
        assert not torch.isfinite(torch.tensor(outcome.norms[1]))
        if after["model.layers.0.up.bias"].numel():
            assert all(torch.equal(after[name], before[name]) for name in before)


def updates_of_deepspeed(case):
    """The outcome, and how many steps DeepSpeed took."""
    taken, step = [], DeepSpeedEngine.step

    def counted(engine, *arguments, **options):
        taken.append(engine)
        return step(engine, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedEngine, "step", counted)
        backend = DeepSpeedBackend()
        outcome, _, mesh = follow(backend, case)
        backend.close_mesh(mesh)
    return outcome.moved, len(taken)


def test_in_bf16_at_stage_0_deepspeed_gets_no_gradient_that_is_not_finite(single):
    # DeepSpeed 0.19.0 says that it skips the step, and takes it.
    case = Case(config=configure(DeepSpeedConfig(stage=0), dtype="bf16"), steps=2, poison=(1, 0))
    assert single.run(updates_of_deepspeed, case) == [([True, False], 1)]


def run_rounded(case):
    """The outcome; of each update, what it scales its gradient by and the sum of squares of this
    rank's part of it."""
    backend, undo = DeepSpeedBackend(), pytest.MonkeyPatch()
    updates, squares = [], []
    update, step = RoundedAdamW.step, TrainingEngine.step

    def updated(optimizer, *arguments):
        # DeepSpeed may update one group at a time.
        for group in optimizer.param_groups:
            gradients = [item.grad.float() for item in group["params"] if item.grad is not None]
            squares.extend(float(gradient.square().sum()) for gradient in gradients)
        return update(optimizer, *arguments)

    def stepped(engine):
        outcome = step(engine)
        updates.append((float(engine.deepspeed.basic_optimizer.factor), sum(squares)))
        squares.clear()
        return outcome

    undo.setattr(RoundedAdamW, "step", updated)
    undo.setattr(TrainingEngine, "step", stepped)
    try:
        outcome, _, mesh = follow(backend, case)
    finally:
        undo.undo()
    backend.close_mesh(mesh)
    return outcome, updates


@pytest.mark.parametrize("settings", STAGES, ids=str)
@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_an_update_in_bf16_clips_by_itself(pair, plain, settings, micro_batches):
    config = configure(DeepSpeedConfig(**settings), dtype="bf16", states="bf16")
    case = Case(config=config, micro_batches=micro_batches)
    assert min(plain.norms) > config.optim.clip
    (outcome, updates), (_, others) = pair.run(run_rounded, case)
    assert outcome.losses == pytest.approx(plain.losses, rel=1e-2)
    assert outcome.norms == pytest.approx(plain.norms, rel=3e-2)
    for norm, (factor, squares), (other, more) in zip(outcome.norms, updates, others, strict=True):
        assert factor == other == pytest.approx(config.optim.clip / norm, rel=1e-4)
        # Nobody has scaled it before.
        whole = squares if config.section.stage == 0 else squares + more
        assert whole**0.5 == pytest.approx(norm, rel=1e-2)


@pytest.mark.parametrize("settings", STAGES, ids=str)
def test_an_update_in_bf16_skips_gradients_that_are_not_finite(pair, settings):
    config = configure(DeepSpeedConfig(**settings), dtype="bf16", states="bf16")
    before = pair.run(run, Case(config=config, steps=1))[0][1]
    for outcome, after in pair.run(run, Case(config=config, steps=2, poison=(1, 1))):
        assert outcome.moved == [True, False]
        if after["model.layers.0.up.bias"].numel():
            assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("settings", STAGES, ids=str)
def test_frozen_parameters_stay_and_do_not_count_in_the_norm(pair, settings):
    frozen = ("model.embed.weight", "model.layers.0.up.weight", "model.layers.1.norm.bias")
    plain = follow(PlainBackend(), Case(config=configure(), frozen=frozen))[0]
    outcome, weights = pair.run(run, Case(config=layout(**settings), frozen=frozen))[0]
    assert outcome.losses == pytest.approx(plain.losses, **EXACT)
    assert outcome.norms == pytest.approx(plain.norms, **EXACT)
    start = pair.run(run, Case(config=layout(**settings), steps=0))[0][1]
    changed = {name for name in weights if not torch.equal(weights[name], start[name])}
    assert changed.isdisjoint({*frozen, "model.head.weight", "model.scale"})
    assert "model.layers.0.up.bias" in changed


def reductions(precision, states):
    """Calls of DeepSpeed's reduction of gradients in a step."""
    backend, calls = DeepSpeedBackend(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            DeepSpeedEngine, "allreduce_gradients", lambda *given, **more: calls.append(given)
        )
        config = configure(DeepSpeedConfig(stage=0), dtype=precision, states=states)
        _, _, mesh = follow(backend, Case(config=config, steps=1))
    backend.close_mesh(mesh)
    return len(calls)


@pytest.mark.parametrize(
    ("precision", "states"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")]
)
def test_one_rank_reduces_nothing(single, pair, precision, states):
    assert single.run(reductions, precision, states) == [0]
    assert pair.run(reductions, precision, states) == [1, 1]
