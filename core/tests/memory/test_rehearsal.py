"""What a step would take of an accelerator, counted without weights."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
import pytest
import torch
from fits import fit_of, on_accelerator, small_run
from torch.utils.checkpoint import checkpoint

from rlhf.config.sections import Config
from rlhf.contract.sums import weighted_loss
from rlhf.data.example import Answer, Example
from rlhf.data.packing import pack
from rlhf.engine import GIB, Mesh, ModelShape, Plan, gib
from rlhf.errors import RLHFError
from rlhf.folder.run_folder import RunFolder
from rlhf.hookspecs import hookimpl
from rlhf.launch.places import Marker
from rlhf.memory import choice
from rlhf.memory.choice import advice, memory_error
from rlhf.memory.estimate import CountedStep, Estimate, LiveBytes, count_step
from rlhf.memory.rehearsal import STRICT, largest_made
from rlhf.readouts import token_logprobs
from rlhf.request.reader import read_config
from rlhf.train.dataset import prepare_data
from rlhf.train.introduction import keep_traceback, memory_lines
from rlhf.train.rank import ran_out
from rlhf.train.set_up import set_up
from rlhf.trainer import Loss, PackedBatch, Term, Trainer
from rlhf_devkit import tiny
from rlhf_devkit.gateways import build_gateways
from rlhf_devkit.plain import PlainBackend


def test_live_and_peak_bytes_are_counted_once() -> None:
    given = torch.zeros(1000)
    with LiveBytes(known=[given]) as counter:
        twice = given * 2
        view = twice.view(10, 100)
        assert counter.live == 4000
        shifted = view + 1
        assert counter.live == 8000
        del twice, view
        assert counter.live == 4000
        shifted.add_(1)
        del shifted
    assert (counter.live, counter.take_peak()) == (0, 8000)


def test_products_of_experts_are_counted_in_any_dtype() -> None:
    rows, weight = torch.empty(64, 16, device="meta"), torch.empty(4, 16, 32, device="meta")
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    with LiveBytes(known=[rows, weight, ends]) as counter:
        product = torch.nn.functional.grouped_mm(rows, weight, offs=ends)
    assert (product.shape, product.dtype) == ((64, 32), torch.float32)
    assert counter.live == counter.take_peak() == 64 * 32 * 4


def test_backward_frees_what_forward_kept() -> None:
    weight = torch.ones(100, 100, requires_grad=True)
    with LiveBytes(known=[weight]) as counter:
        result = (weight @ weight).sin()
        kept = counter.live
        result.sum().backward()
        del result
    assert kept == 2 * 40_000
    assert counter.live == 40_000, "only the gradient is left"


ESTIMATE = Estimate(
    states={
        "policy": {"weights": 3 * GIB, "gradients": 3 * GIB, "optimizer": 18 * GIB, "buffers": 0},
        "reference": {"weights": 3 * GIB},
    },
    updating=9 * GIB,
    step=CountedStep(40 * GIB, ((45 * GIB, 0, 0),), total=3),
    tokens=16_384,
)


def test_an_estimate_reads_as_one_line() -> None:
    assert str(ESTIMATE) == (
        "72.0 GiB at the peak: weights 3.0, gradients 3.0, optimizer 18.0, reference 3.0, "
        "activations 40.0, head 5.0 (16,384 tokens at once)"
    )
    assert gib(GIB // 4) == "0.250"


def test_the_optimizers_step_can_be_the_peak() -> None:
    estimate = attrs.evolve(ESTIMATE, step=CountedStep(GIB, ((GIB, 0, 0),), total=3))
    assert estimate.peak == 36 * GIB
    assert str(estimate) == (
        "36.0 GiB at the peak: weights 3.0, gradients 3.0, optimizer 18.0, reference 3.0, "
        "optimizer's step 9.0 (16,384 tokens at once)"
    )


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_survey_can_be_the_peak_when_no_gradient_exists(accumulates: bool) -> None:
    step = CountedStep(40 * GIB, ((45 * GIB, 0, 0),), total=3, survey=50 * GIB)
    estimate = attrs.evolve(ESTIMATE, accumulates=accumulates, step=step)
    assert estimate.peak == 74 * GIB
    assert str(estimate) == (
        "74.0 GiB at the peak: weights 3.0, optimizer 18.0, reference 3.0, survey 50.0 "
        "(16,384 tokens at once)"
    )
    # Fewer tokens do not make the survey smaller: it may hold all rows of a step.
    assert estimate.peak_with(8192) == 74 * GIB


def test_gradients_do_not_exist_yet_in_the_only_micro_batch_of_a_step() -> None:
    assert attrs.evolve(ESTIMATE, accumulates=False).peak == 69 * GIB


def test_gradients_can_exist_beside_the_last_activations() -> None:
    step = CountedStep(40 * GIB, ((45 * GIB, 0, 0), (47 * GIB, 3, 0)), total=3)
    estimate = attrs.evolve(ESTIMATE, accumulates=False, step=step)
    assert estimate.peak == 74 * GIB
    assert str(estimate) == (
        "74.0 GiB at the peak: weights 3.0, optimizer 18.0, reference 3.0, gradients 3.0, "
        "activations 47.0 (16,384 tokens at once)"
    )
    # With several micro-batches all are there from the start, which is what `resident` says.
    assert attrs.evolve(estimate, accumulates=True).peak == 74 * GIB


class Chain:
    """What a trainer is for `step_bytes`: layers in a row over a few tokens."""

    def __init__(self, embedding: int, width: int, depth: int, *, again: bool) -> None:
        self.embedding = torch.nn.Embedding(embedding, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
        self.again = again

    def needs_survey(self) -> bool:
        return False

    def loss(self, batch: Any) -> Loss:
        hidden = self.embedding(torch.arange(4))
        for layer in self.layers:
            # A layer's own work is two products and what is between.
            run = partial(self.run, layer)
            hidden = checkpoint(run, hidden, use_reentrant=False) if self.again else run(hidden)
        return Loss((Term(hidden.sum(), per="tokens"),))

    def run(self, layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return layer(torch.tanh(layer(hidden).repeat(32, 1)))[:4]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("embedding", "depth"), [(5000, 2), (8, 6), (8, 1)])
def test_growing_gradients_are_counted_like_those_of_a_step(
    embedding: int, depth: int, again: bool
) -> None:
    chain: Any = Chain(embedding, 64, depth, again=again)
    modules = [chain.embedding, chain.layers]
    weights = [weight for module in modules for weight in module.parameters()]
    size = sum(weight.nbytes for weight in weights)
    measured = count_step(chain, cast(Any, None), modules)
    assert all(weight.grad is None for weight in weights)
    with LiveBytes(known=weights) as counter:
        loss = chain.loss(None)
        total = weighted_loss(loss, {"tokens": 1.0})
        total.backward()
    assert measured.peak_with_gradients(size) == counter.take_peak()


class Surveying(Chain):
    """A chain whose survey takes 4 KB for each token."""

    def needs_survey(self) -> bool:
        return True

    def survey(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"sum": torch.ones(len(batch.tokens), 1024).sum(1)}


def test_a_survey_s_own_micro_batch_is_counted() -> None:
    chain: Any = Surveying(8, 64, 2, again=False)
    modules = [chain.embedding, chain.layers]
    few, many = (pack([Example([], [Answer([0] * n)])], [0]) for n in (10, 1000))
    alone = count_step(chain, few, modules)
    counted = count_step(chain, few, modules, surveyed=many)
    assert alone.survey < 4096 * 1000 <= counted.survey
    assert counted.peak() == pytest.approx(alone.peak(), abs=4 * 1000)


@pytest.mark.parametrize("room", [0, 20_000, 10_000_000])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("embedding", "depth"), [(5000, 2), (8, 6)])
def test_gradients_that_wait_for_their_reduction_are_in_the_peak(
    embedding: int, depth: int, again: bool, room: int
) -> None:
    chain: Any = Chain(embedding, 64, depth, again=again)
    modules = [chain.embedding, chain.layers]
    weights = [weight for module in modules for weight in module.parameters()]
    counted = count_step(chain, cast(Any, None), modules)
    measured = counted.peak(reducing=room)
    waiting = torch.empty(0)
    whole = 0

    def reduce(weight: torch.Tensor) -> None:
        nonlocal waiting, whole
        whole += weight.nbytes
        weight.grad = None
        waiting = torch.empty(0)  # The old goes before the new is there.
        waiting = torch.empty(min(whole, room), dtype=torch.uint8)

    for weight in weights:
        weight.register_post_accumulate_grad_hook(reduce)
    with LiveBytes(known=weights) as counter:
        loss = chain.loss(None)
        total = weighted_loss(loss, {"tokens": 1.0})
        total.backward()
    assert measured == counter.take_peak()


def test_a_run_knows_whether_its_steps_are_one_micro_batch(words: list[str]) -> None:
    assert not fit_of(words, GIB).estimate.accumulates
    assert fit_of([*words, "--batch.tokens", "150"], GIB).estimate.accumulates


def test_the_peak_with_fewer_tokens_follows() -> None:
    assert ESTIMATE.peak_with(8_192) == 27 * GIB + 45 * GIB // 2
    # The update takes 9 GiB when no activation is left, however few the tokens.
    assert ESTIMATE.peak_with(16) == 36 * GIB


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return small_run(tmp_path_factory.mktemp("rehearsal"))


class TwoModels(Trainer):
    """A trained language model, and a trained module of its own."""

    def example(self, row: Any) -> Any: ...

    def setup(self, run: Any) -> None:
        self.policy = run.load("policy")
        self.critic = run.prepare(torch.nn.Linear(1, 64), "critic")

    def loss(self, batch: PackedBatch) -> Loss:
        logprobs = self.policy(batch, token_logprobs)["logprobs"]
        values = self.critic(logprobs[:, None].detach())
        return Loss((Term(-logprobs.sum(), "tokens"), Term(values.sum(), "tokens", role="critic")))


def test_every_trained_model_is_in_the_estimate(words: list[str]) -> None:
    fit = fit_of(words, GIB)
    one, random = fit.estimate, torch.get_rng_state()
    both = attrs.evolve(fit, trainer=TwoModels(None, fit.trainer.tokenizer)).estimate
    assert both.states["critic"] == {"weights": 512, "gradients": 512, "optimizer": 1024}
    assert both.resident == one.resident + 2048
    assert "critic 0.000" in str(both)
    assert torch.equal(torch.get_rng_state(), random), "only rank 0 rehearses"


class Rewarded(Trainer):
    """A loss with values that only the examples of a rollout have."""

    def rollout_shape(self, examples: Any, most: int) -> Example:
        values = {"old": [[0.0] * 9] * 2, "advantage": [0.0] * 2, "weight": 0.0}
        return Example([0] * 5, [Answer([0] * 9)] * 2, values)

    def example(self, row: Any) -> Any: ...

    def setup(self, run: Any) -> None:
        self.policy = run.load("policy")

    def rollout(self, examples: Any, step: int, seeds: Any) -> Any: ...

    def loss(self, batch: PackedBatch) -> Loss:
        logprobs = self.policy(batch, token_logprobs)["logprobs"]
        weights = batch.values["weight"][batch.answer_example] * batch.values["advantage"]
        gains = (logprobs - batch.values["old"][batch.predict_at]) * weights[batch.answer]
        return Loss((Term(gains.sum(), "tokens"),))


def test_values_of_a_rollout_are_in_the_step_that_is_counted(words: list[str]) -> None:
    fit = fit_of(words, GIB)
    step = attrs.evolve(fit, trainer=Rewarded(None, fit.trainer.tokenizer)).estimate
    assert step.states == fit.estimate.states
    assert step.step.activations > 0


def test_the_parts_of_a_divided_example_are_micro_batches() -> None:
    made = Example([0] * 100, [Answer([0] * 500)] * 6)
    batch = SimpleNamespace(size=8, budget=1200)
    order: Any = SimpleNamespace(
        config=SimpleNamespace(batch=batch), ranks=8, round_to=1, examples=[made]
    )
    largest = largest_made(order, made)
    # Two answers to a prompt at a time.
    assert (len(largest.loss.tokens), largest.loss.num_answers) == (1200, 2)
    assert largest.accumulates
    batch.budget = 3100
    assert not largest_made(order, made).accumulates


class Judged(TwoModels):
    """A loss with values that a frozen model has computed."""

    widths: tuple[int | None, ...] = ()

    def setup(self, run: Any) -> None:
        self.policy = run.load("policy")
        for width in self.widths:
            run.attach(f"judge{width}", run.config.model, None, key="any", width=width)

    def loss(self, batch: PackedBatch) -> Loss:
        logprobs = self.policy(batch, token_logprobs)["logprobs"]
        for width in self.widths:
            values = batch.values[f"judge{width}"].index_select(0, batch.predict_at)
            logprobs = logprobs * values.view(len(logprobs), width or 1).sum(1)
        return Loss((Term(-logprobs.sum(), "tokens"),))


def test_values_that_a_frozen_model_computes_are_in_the_step_that_is_counted(
    words: list[str],
) -> None:
    fit = fit_of(words, GIB)

    class Wide(Judged):
        widths = (None, 1000)

    bare, wide = (
        attrs.evolve(fit, trainer=kind(None, fit.trainer.tokenizer)).estimate
        for kind in (Judged, Wide)
    )
    # No model but the policy is loaded when steps run.
    assert wide.states == bare.states
    assert wide.peak > bare.peak + 2**19


class Reducing(PlainBackend):
    """A backend that keeps no gradients; some bytes of them wait for their reduction."""

    @hookimpl
    def estimate_memory(
        self, config: Config, plan: Plan, model_shape: ModelShape, mesh: Mesh, trained: bool
    ) -> Mapping[str, int]:
        return {"weights": 1000, "updating": 0, "reducing": 300, "host": 50}


def test_gradients_that_wait_for_their_reduction_come_and_go(words: list[str]) -> None:
    fit = fit_of(words, GIB, Reducing())
    estimate = fit.estimate
    assert estimate.reducing == 300
    assert estimate.states == {"policy": {"weights": 1000}}
    assert estimate.host == 50


def test_the_line_states_the_memory_and_whether_the_step_fits(words: list[str]) -> None:
    peak = fit_of(words, GIB).estimate.peak
    line = fit_of(words, GIB).line()
    assert line.startswith(f"memory     {gib(peak)} GiB at the peak: weights ")
    assert line.endswith(" tokens at once), of 1.0 GiB")
    assert fit_of(words, peak).line().endswith(" GiB; this probably will not fit: see `rlhf plan`")


def test_memory_is_printed_before_weights_are_read(tmp_path, capsys) -> None:
    request = read_config("sft", overrides=small_run(tmp_path))
    hooks, observers = build_gateways(PlainBackend())
    data, mesh = prepare_data(request), Mesh(device=torch.device("cuda", 0), memory=GIB)
    for weights in Path(request.config.model.path).glob("*.safetensors"):
        weights.unlink()
    folder = RunFolder(tmp_path / "begun", fresh=True)
    with folder, pytest.raises(RLHFError, match="weights"):
        set_up(request, data, mesh, hooks, observers, folder.path, folder, Marker(None, 0))
    assert "\nmemory     " in capsys.readouterr().out


def test_recomputed_compiled_layers_keep_only_their_inputs(words: list[str]) -> None:
    def activations(**more: str) -> int:
        options = [word for name, value in more.items() for word in (f"--model.{name}", value)]
        return fit_of([*words, *options], GIB).estimate.step.activations

    again = activations(kernels="compile", recompute="full")
    assert again <= activations(kernels="none", recompute="full")
    assert again < activations(kernels="compile", recompute="none") / 2


def test_an_error_names_what_fits_with_a_number(words: list[str]) -> None:
    fit = fit_of(words, GIB)
    lean = fit_of([*words, "--model.recompute", "selective"], GIB)
    cause = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
    assert str(memory_error(fit, cause)) == (
        "out of memory on cpu, which has 1.0 GiB, when allocating 2.00 GiB more; a step was "
        f"estimated at {gib(fit.peak)} GiB: set model.recompute selective (about "
        f"{gib(lean.peak)} GiB); `rlhf plan` lists what fits"
    )


def test_fewer_tokens_are_advised_even_if_they_are_configured(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "LEAST_TOKENS", 1)
    whole, half = (
        on_accelerator([*words, "--model.recompute", "full", "--batch.tokens", tokens], GIB)
        for tokens in ("400", "200")
    )
    assert advice(whole) == f"set batch.tokens 200 (about {gib(half.peak)} GiB)"


def test_if_no_setting_can_be_lowered_another_way_is_named(words: list[str]) -> None:
    one_row = ["--batch.size", "1", "--model.recompute", "full"]
    fit = fit_of([*words, *one_row], 1000)
    assert advice(fit) == "train with lora, or use a device with more memory"


def test_a_model_that_looks_at_values_has_no_estimate_but_runs(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(STRICT, raising=False)

    class Looking(type(fit_of(words, GIB).trainer)):  # type: ignore[misc]
        def loss(self, batch):
            assert batch.tokens.sum().item() > 0
            return super().loss(batch)

    fit = fit_of(words, GIB)
    looking = attrs.evolve(fit, trainer=Looking(fit.trainer.config, fit.trainer.tokenizer))
    on_device = attrs.evolve(looking, mesh=on_accelerator(words, GIB).mesh)
    assert memory_lines(on_device, "") == [looking.line()]
    with RunFolder(tmp_path, fresh=True) as folder:
        keep_traceback(on_device, folder)
    assert looking.line().startswith("memory     not estimated: RuntimeError: ")
    assert looking.line().endswith(" (details: errors/rehearsal.txt)")
    assert "batch.tokens.sum().item() > 0" in (tmp_path / "errors" / "rehearsal.txt").read_text()
    assert str(memory_error(looking, torch.OutOfMemoryError("x"))) == (
        "out of memory on cpu, which has 1.0 GiB: lower batch.tokens, or set model.recompute to "
        "full"
    )


def test_attention_that_is_not_ours_is_not_guessed(words: list[str], tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path / "model")
    settings = json.loads((model / "config.json").read_text()) | {"attention_dropout": 0.1}
    (model / "config.json").write_text(json.dumps(settings))
    fit = on_accelerator([*words, "--model", str(model)], 1000)
    assert fit.line() == (
        "memory     not estimated: its attention dropout is 0.1, which is not known without values"
    )


def test_with_unknown_memory_the_line_only_has_the_estimate(words: list[str]) -> None:
    fit = on_accelerator(words, 0)
    assert fit.line().endswith(" tokens at once)")


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_the_out_of_memory_errors_of_all_libraries_are_recognised(
    error: Exception, is_it: bool
) -> None:
    assert ran_out(error) == is_it


def test_a_rehearsal_draws_no_random_numbers_and_writes_no_file(words: list[str]) -> None:
    torch.manual_seed(0)
    fit = fit_of(words, GIB)
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    assert fit.estimate is not None
    assert torch.equal(torch.randn(3), expected), "it must not draw from the generators"
    assert not Path(fit.config.output or "").exists()


@pytest.mark.parametrize("accumulates", [False, True])
def test_images_are_a_part_of_the_peak(accumulates: bool) -> None:
    step = CountedStep(40 * GIB, ((45 * GIB, 0, 0),), total=3, images=6 * GIB)
    estimate = attrs.evolve(ESTIMATE, accumulates=accumulates, step=step, images=2 * GIB)
    assert estimate.peak == attrs.evolve(ESTIMATE, accumulates=accumulates).peak + 2 * GIB
    assert sum(estimate.parts().values()) == estimate.peak
    assert "activations 34.0, head 5.0, images 8.0 (16,384 tokens at once)" in str(estimate)
    # The images of a step are on the device when its gradients are complete, too.
    update = attrs.evolve(estimate, step=CountedStep(GIB, ((GIB, 0, 0),), total=3))
    assert sum(update.parts().values()) == update.peak == 38 * GIB
    assert "optimizer's step 9.0, images 2.0" in str(update)
