"""The memory of a step with images, counted without weights, and what a run chooses by it."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_families import example_with_images, image_model

from image_runs import TRAINER, as_row, write_run
from rlhf.data.packing import has_images
from rlhf.engine import GIB, Mesh
from rlhf.memory.choice import AMPLE, choose
from rlhf.memory.estimate import count_step
from rlhf.memory.fit import StepFit
from rlhf.memory.rehearsal import STRICT, Rehearsed, largest
from rlhf.registry.installed import NotInstalled
from rlhf.request.reader import read_config
from rlhf.train.dataset import prepare_data
from rlhf.train.set_up import step_fit
from rlhf.trainer import PackedBatch
from rlhf_devkit.gateways import build_gateways
from rlhf_devkit.plain import PlainBackend
from rlhf_devkit.tiny import in_plain_torch, step_memory, write_rows

MORE = partial(pytest.param, marks=pytest.mark.matrix)
WHOLE = ("--model.train", "[language, projector, vision]")
AGAIN = (*WHOLE, "--model.recompute", "full")

WRITER = """
from rlhf.readouts import token_logprobs
from rlhf.trainer import Answer, Example, Loss, Term, Trainer, with_answers


class Answering(Trainer):
    row_format = None
    length = 12

    def example(self, row):
        return with_answers(Example(row["prompt"], [], inputs=row["inputs"]), [])

    def setup(self, run):
        self.policy = run.load("policy")

    def written(self, example):
        answers = [Answer([7] * self.length)] * 3
        values = {"drawn": [[0.0] * self.length] * 3, "advantage": [1.0] * 3}
        return with_answers(example, answers, values)

    def rollout_shape(self, examples, most):
        return self.written(Example([0] * int(examples.prompt_lengths.max()), []))

    def rollout(self, examples, step, seeds):
        return [self.written(example) for example in examples]

    def loss(self, batch):
        ratio = self.policy(batch, token_logprobs)["logprobs"] - batch.values["drawn"][
            batch.predict_at
        ]
        gain = ratio.exp() * batch.values["advantage"][batch.answer]
        return Loss((Term(-gain.sum(), per="tokens"),))
"""


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trainer of rows that are examples."""
    file = tmp_path_factory.mktemp("trainer") / "counted.py"
    file.write_text(TRAINER)
    return f"{file}:Pictured"


def fit_of(trainer: str, words: list[str], memory: int = GIB) -> StepFit:
    """The fit of a run on an accelerator of so many bytes."""
    request = read_config(trainer, overrides=words)
    hooks, _ = build_gateways(PlainBackend())
    mesh = Mesh(device=torch.device("cuda", 0), memory=memory)
    return step_fit(request.config, prepare_data(request), mesh, hooks)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Qwen2.5-VL", ()),
        MORE("Qwen2.5-VL", WHOLE),
        MORE("Qwen2.5-VL", AGAIN),
        MORE("Qwen3-VL", ()),
        ("Qwen3-VL", WHOLE),
        MORE("Qwen3-VL", AGAIN),
        MORE("LLaVA", ()),
        MORE("LLaVA", WHOLE),
        ("LLaVA", AGAIN),
        ("SmolVLM", ()),
        MORE("SmolVLM", WHOLE),
        MORE("SmolVLM", AGAIN),
        MORE("Mistral 3", WHOLE),
        MORE("InternVL", WHOLE),
        MORE("LLaVA-OneVision", WHOLE),
        MORE("Gemma 3", ()),
        ("Gemma 3", WHOLE),
        MORE("Gemma 3", AGAIN),
    ],
)
def test_a_step_with_images_takes_what_was_counted(
    name: str, settings: tuple[str, ...], tmp_path: Path, trainer: str
) -> None:
    words = [*write_run(name, tmp_path), "--batch.tokens", "96", *settings]
    words += ["--output", str(tmp_path / "run")]
    counted, taken = step_memory(trainer, words, str(tmp_path / "cache"))
    for estimate, measured in zip(counted, taken, strict=True):
        # On the CPU attention keeps copies of keys and values that a fused kernel does not. An
        # index of padded rows, of 8 bytes for each token, is only seen on the meta device.
        assert estimate - 8 * 96 <= measured <= 1.15 * estimate


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trainer that answers prompts."""
    file = tmp_path_factory.mktemp("writer") / "answering.py"
    file.write_text(WRITER)
    return f"{file}:Answering"


@pytest.mark.parametrize(
    ("name", "settings"),
    [("Qwen2.5-VL", ()), ("Qwen3-VL", WHOLE), MORE("LLaVA", WHOLE), MORE("Gemma 3", WHOLE)],
)
def test_a_step_on_answers_to_images_takes_at_most_what_was_counted(
    name: str, settings: tuple[str, ...], tmp_path: Path, writer: str
) -> None:
    """Also if the answers are short, so that more images fit into a micro-batch."""
    words = [*write_run(name, tmp_path), "--batch.tokens", "160", "--batch.size", "6", *settings]
    words += ["--output", str(tmp_path / "run")]
    backend, session, fit = in_plain_torch(writer, words, str(tmp_path / "cache"))
    assert isinstance(fit.rehearsed, Rehearsed), fit.rehearsed
    most, order = fit.rehearsed.most, session.train_order
    modules = [engine.module for engine in backend.engines]
    session.train()
    trainer: Any = session.trainer

    def peak(batch: PackedBatch) -> int:
        return count_step(trainer, batch, modules).peak()

    bound, taken = max(map(peak, (most.loss, *most.others))), 0
    # A prompt without the answers to it.
    blank = min(len(example.prompt) for example in order.examples if has_images(example))
    for step in range(2):
        rows = order.rows(step)
        for trainer.length in (1, 12):
            made = trainer.rollout([order.examples[int(row)] for row in rows], step, [])
            _, batches = order.step_of(made, rows)
            assert {batch.blank for batch in batches} <= {0, blank}
            taken = max(taken, *map(peak, batches))
            held = sum(value.nbytes for batch in batches for value in batch.inputs.values())
            assert 0 < held <= 1.15 * most.images
    assert bound / 2 <= taken <= bound
    short, text = most.others
    # It has the images of more prompts than have room with whole answers.
    assert short.num_examples > most.loss.num_examples
    assert text.blank == blank
    if settings:
        assert fit.rehearsed.step.images > 0


def test_the_tower_takes_more_if_it_is_trained(tmp_path: Path, trainer: str) -> None:
    words = [*write_run("Qwen3-VL", tmp_path), "--output", str(tmp_path / "run")]
    frozen, whole, again = (
        fit_of(trainer, [*words, *settings]).estimate for settings in ((), WHOLE, AGAIN)
    )
    assert frozen
    assert whole
    assert again
    assert 0 < again.step.images < whole.step.images
    assert 0 < frozen.step.images < whole.step.images
    assert frozen.images == whole.images > 0
    parts = whole.parts()
    assert parts["images"] == whole.images + whole.step.images
    assert sum(parts.values()) == whole.peak


def test_the_images_of_a_step_are_counted_with_those_of_its_blanks(
    tmp_path: Path, trainer: str
) -> None:
    words = [*write_run("Qwen2.5-VL", tmp_path), "--output", str(tmp_path / "run")]
    fit = fit_of(trainer, [*words, "--batch.tokens", "96"])
    order = fit.rehearsed.run.order(fit.trainer)  # type: ignore[union-attr]
    steps = [[order[rows] for rows in order.step(number).micro] for number in range(3)]
    assert any(batch.blank for step in steps for batch in step)
    assert fit.estimate

    def most(*names: str) -> int:
        """Bytes of these inputs in the step that has most of them."""
        return max(sum(batch.inputs[n].nbytes for batch in step for n in names) for step in steps)

    # Positions of tokens that only fill up tiles are not counted.
    assert most("pixel_values") < fit.estimate.images < most(*steps[0][0].inputs)


def write_mixed(folder: Path) -> list[str]:
    """A run of rows of which one is small and has many images, and one is long and has none."""
    words, causal, draw = write_run("LLaVA", folder), image_model("LLaVA"), np.random.default_rng(1)
    images, lengths = (6, 0, 0, 1), (8, 200, 60, 60)
    rows = [
        as_row(example_with_images("LLaVA", causal, draw, count, 0, lengths=(length, 5)))
        for count, length in zip(images, lengths, strict=True)
    ]
    write_rows(folder / "rows.jsonl", rows)
    return [*words, "--batch.tokens", "210", "--output", str(folder / "run")]


def test_the_micro_batch_with_the_most_images_is_counted(tmp_path: Path, trainer: str) -> None:
    fit = fit_of(trainer, write_mixed(tmp_path))
    order = fit.rehearsed.run.order(fit.trainer)  # type: ignore[union-attr]
    most = largest(order, 1)
    assert (most.loss.rows, most.loss.blank) == ((1,), 49)
    assert [sorted(batch.rows) for batch in most.others] == [[0, 2, 3]]


def test_tokens_are_chosen_with_images(
    tmp_path: Path, trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STRICT, "1")
    words = [*write_run("Qwen3-VL", tmp_path), "--output", str(tmp_path / "run"), *WHOLE]
    fit = fit_of(trainer, [*words, "--batch.tokens", "40"])
    choice, line = choose(fit, any_tokens=True)
    assert choice.tokens > 40
    assert line.startswith(f"tokens     {choice.tokens} per micro-batch: about 1 micro-batch")
    whole = fit.under(*choice).estimate
    assert fit.estimate
    assert whole
    assert whole.step_peak > fit.estimate.step_peak
    tight = int(fit.estimate.peak_with(80) / AMPLE) - 1000
    few = fit_of(trainer, [*words, "--batch.tokens", "40"], tight)
    assert choose(few, any_tokens=True)[0].tokens == 40


def line_of(name: str, folder: Path, trainer: str) -> str:
    words = [*write_run(name, folder), "--output", str(folder / "run")]
    return fit_of(trainer, words).line()


def test_the_line_has_a_part_for_images(tmp_path: Path, trainer: str) -> None:
    line = line_of("LLaVA", tmp_path, trainer)
    assert ", activations " in line
    assert ", images " in line


def test_the_reader_of_images_knows_their_sizes(
    tmp_path: Path, trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(kind: str, name: str) -> Any:
        raise NotInstalled(f"{kind} '{name}' is not installed; run `pip install rlhf-vision`")

    monkeypatch.setattr("rlhf.memory.rehearsal.find", find)
    assert line_of("LLaVA", tmp_path, trainer) == (
        "memory     not estimated: media 'images' is not installed; run `pip install rlhf-vision` "
        "(details: errors/rehearsal.txt)"
    )
