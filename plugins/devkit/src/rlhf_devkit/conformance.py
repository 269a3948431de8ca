"""The tests that every trainer must pass, as a class to subclass in a test file.

    class TestMine(TrainerConformance):
        trainer = "mine"
        others = {"power": 2.0}

Each test makes the smallest real runs: a Llama of two layers and 22 rows on the CPU, in plain torch
and through the backend on one and two ranks, in each layout that its record calls `tested`. The
ranks are those of `rlhf_devkit.ranks.shared`, so all test files of a session use the same
processes. A trainer takes about half a minute, and a second for each setting.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
import yaml
from attrs import frozen

import rlhf_demo
from rlhf.config.field_docs import documented, field_docs
from rlhf.config.structure import setting_name
from rlhf.registry.imports import load_object
from rlhf.request.reader import read_config
from rlhf.request.settings_tree import to_tree
from rlhf_devkit import tiny
from rlhf_devkit.bench import NUM_HELD_OUT, NUM_ROWS, NUM_STEPS, STOP_AT, Bench, layouts
from rlhf_devkit.curves import column, same_curve, training, weights, without_timings
from rlhf_devkit.once import Once
from rlhf_devkit.promises import promise

BUDGETS = {"the least tokens": 1, "twice the tokens": 2, "one micro-batch": 16}
"""`batch.tokens` as multiples of the largest example."""


@documented
@frozen(kw_only=True)
class Other:
    """Another value of a setting that acts only with further settings."""

    value: Any
    """The other value."""
    under: Mapping[str, Any]
    """Further settings of the trainer's section, set with the default and with `value` alike."""


@documented
class TrainerConformance:
    """The tests. A subclass names its trainer and gives each of its settings another value."""

    trainer: ClassVar[str]
    """Name of the trainer: that of its entry point, or `FILE.py:CLASS`."""
    rows: ClassVar[Sequence[Mapping[str, Any]] | None] = None
    """At least 29 rows: 22 to train on, 7 held out. None takes the demo's in the trainer's row
    format."""
    words: ClassVar[Sequence[str]] = ()
    """More words for the command line of every run. `{model}` is the model's folder,
    `{other_model}` that of a model of the same shape with other weights, and `{ending_model}` that
    of a model that often writes EOS."""
    others: ClassVar[Mapping[str, Any]] = {}
    """For each setting of the trainer a value that must change the loss, or an `Other`."""
    without_effect: ClassVar[Mapping[str, str]] = {}
    """Settings that do not change the loss, with the reason."""
    backend: ClassVar[str | None] = None
    """Name of the backend; None takes the only one that is installed."""
    ranks: ClassVar[int] = 2
    """Processes of the runs through the backend; 1 for a backend that has no more."""
    precisions: ClassVar[Sequence[str]] = ("bf16",)
    """Values of `model.dtype` other than fp32 that the backend has on a CPU."""
    rate: ClassVar[str] = "1e-2"
    """Learning rate of the runs: high enough that a wrong gradient changes the next loss."""
    clip: ClassVar[str] = "0.05"
    """Largest gradient norm of the runs: below that of every step, since without clipping AdamW
    hides a gradient of the wrong scale."""
    marks_of_other_layouts: ClassVar[Sequence[pytest.MarkDecorator]] = ()
    """Marks of the tests in all layouts of the backend but the last, such as one by which a quick
    run of the tests leaves them out."""

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Give a test that has the argument `layout` each layout of the backend."""
        if "layout" in metafunc.fixturenames:
            *others, last = layouts(cls.backend)
            marked = [pytest.param(name, marks=cls.marks_of_other_layouts) for name in others]
            metafunc.parametrize("layout", [*marked, last])
        if "precision" in metafunc.fixturenames:
            metafunc.parametrize("precision", cls.precisions)

    @pytest.fixture(scope="class")
    @classmethod
    def once(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Once, Path]]:
        """What the tests of the class share, and its folder."""
        folder = tmp_path_factory.mktemp(f"conformance-{cls.__name__}")
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("RLHF_CACHE", str(folder / "cache"))
            yield Once(), folder

    @pytest.fixture
    def bench(self, once: tuple[Once, Path]) -> Bench:
        """The inputs and runs of the class."""
        shared, folder = once
        return shared.get("the set-up of the tests", lambda: bench_of(type(self), folder))

    @promise("a record imports no torch", "plugins.md, A trainer")
    def test_the_record_imports_neither_torch_nor_transformers(self) -> None:
        if ".py:" in self.trainer:
            pytest.skip("the trainer of a file has no record")
        code = (
            "import sys; from rlhf.registry.trainer_files import load_trainer; "
            f"load_trainer({self.trainer!r}); "
            "print(*sorted({'torch', 'transformers', 'deepspeed', 'datasets'} & {*sys.modules}))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
        assert not done.stderr, f"the record of {self.trainer} cannot be read: {done.stderr}"
        assert not done.stdout.strip(), (
            f"the record of {self.trainer} imports {done.stdout.strip()}; import them in the "
            "trainer's module only"
        )

    @promise("a configuration reads back what it writes", "testing.md, Trainers")
    def test_the_configuration_survives_a_round_trip(self, bench: Bench, tmp_path: Path) -> None:
        config = read_config(self.trainer, overrides=bench.words).config
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(to_tree(config), sort_keys=False), encoding="utf-8")
        again = read_config(self.trainer, overrides=[str(file)]).config
        assert again == config, "a configuration that is written and read again differs"
        section: Any = type(config.own)
        fields, docs = attrs.fields(section), field_docs(section)
        bare = sorted(setting_name(item) for item in fields if item.name not in docs)
        assert not bare, f"`rlhf config` prints the docstrings of settings; add one to {bare}"

    @promise("the loss changes and every gradient is clipped", "testing.md, Trainers")
    def test_the_curve_means_something(self, bench: Bench) -> None:
        curve = column(bench.plain(), "loss")
        assert len(set(curve)) == NUM_STEPS, f"the loss does not change: {curve}"
        norms = column(bench.plain(), "grad_norm")
        assert min(norms) > float(self.clip), (
            f"clip {self.clip} does not act on all gradient norms {norms}; lower it"
        )

    @promise("the curve does not depend on batch.tokens", "plugins.md, Rules")
    @pytest.mark.parametrize("budget", BUDGETS)
    def test_the_curve_on_one_rank_is_that_of_plain_torch(self, budget: str, bench: Bench) -> None:
        tokens, plainest = str(BUDGETS[budget] * bench.longest), self._layout()
        metrics = bench.run(budget, 1, *plainest, "--batch.tokens", tokens)
        same_curve(metrics, bench.plain())

    @promise("the curve does not depend on ranks and layout", "plugins.md, Rules")
    def test_the_curve_on_all_ranks_is_that_of_plain_torch(self, layout: str, bench: Bench) -> None:
        same_curve(bench.run(layout, self.ranks, *self._layout(layout)), bench.plain())

    @promise("a trainer runs in bf16, the default", "testing.md, Trainers")
    def test_a_run_in_another_precision_begins_like_that_in_fp32(
        self, precision: str, bench: Bench
    ) -> None:
        last = [*layouts(self.backend)][-1]
        words = ("--model.dtype", precision, "--train.stop_at", "2", *self._layout(last))
        losses = column(bench.run(precision, 1, *words), "loss")
        expected = column(bench.plain(), "loss")[:2]
        assert losses == pytest.approx(expected, rel=0.1, abs=0.1), (
            f"at model.dtype {precision} the first losses are not near those in fp32"
        )

    @promise("a resumed run is the same to the last bit", "plugins.md, Further methods")
    def test_a_resumed_run_is_the_same_to_the_last_bit(self, layout: str, bench: Bench) -> None:
        words = self._layout(layout)
        straight = bench.run(layout, self.ranks, *words)
        name = f"{layout} in halves"
        bench.start(name, self.ranks, *words, "--train.stop_at", str(STOP_AT))
        halves = bench.start(name, self.ranks, *words, "--resume")
        differs = "a run that was stopped and resumed differs from one that was not, in "
        assert without_timings(training(halves)) == without_timings(training(straight)), (
            f"{differs}its metrics; does `state` return all that the trainer keeps?"
        )
        assert without_timings(halves[-1:]) == without_timings(straight[-1:]), (
            f"{differs}its last evaluation"
        )
        same = weights(bench.folder / name) == weights(bench.folder / layout)
        assert same, f"{differs}its exported weights"

    @promise("ranks sample together", "testing.md, Trainers")
    def test_ranks_sample_together_though_answers_end_at_different_lengths(
        self, bench: Bench
    ) -> None:
        sections = ({}, *starmap(_section, self.others.items()))
        sampling = next(filter(bench.samples, sections), None)
        if sampling is None:
            pytest.skip("the trainer has no rollout")
        last = [*layouts(self.backend)][-1]
        metrics, plain = bench.ending(sampling, self.ranks, *self._layout(last))
        for name in ("loss", "grad_norm"):
            assert column(metrics, name) == pytest.approx(
                column(plain, name), rel=1e-4, abs=1e-5
            ), f"if the model ends its answers {name} is not that in plain torch"

    @promise("packed rows are independent of each other", "plugins.md, The packed batch")
    def test_packed_equals_separate_in_loss_and_gradients(self, bench: Bench) -> None:
        words = [*bench.words, "--output", str(bench.folder / "unused")]
        words += ["--batch.tokens", str(16 * bench.longest)]
        (packed,) = tiny.first_steps(self.trainer, words, bench.cache, num_steps=1)
        (separate,) = tiny.first_steps(
            self.trainer, words, bench.cache, num_steps=1, path="separate", one_by_one=True
        )
        differs = "the step packed into one row differs from its examples one by one, in"
        assert packed.loss == pytest.approx(separate.loss, abs=1e-5, rel=1e-6), (
            f"{differs} its loss"
        )
        assert packed.gradients.keys() == separate.gradients.keys(), (
            f"{differs} which parameters have a gradient"
        )
        for name, gradient in separate.gradients.items():
            torch.testing.assert_close(
                packed.gradients[name],
                gradient,
                rtol=1e-4,
                atol=1e-5,
                msg=f"{differs} the gradient of {name}: {{}}".format,
            )

    @promise("the memory of a step is known without its weights", "plugins.md, Rules")
    def test_the_memory_of_a_step_is_estimated_without_its_weights(self, bench: Bench) -> None:
        words = [*bench.words, "--output", str(bench.folder / "unused")]
        estimated, measured = tiny.step_memory(self.trainer, words, bench.cache)
        for moment, estimate, taken in zip(
            ("when backward begins", "at the peak"), estimated, measured, strict=True
        ):
            # On the CPU attention keeps copies of keys and values that a fused kernel does not.
            assert estimate <= taken <= 1.3 * estimate, (
                f"{moment} a step takes {taken:,} bytes, but the estimate without weights is "
                f"{estimate:,}"
            )

    @promise("a resumed run is the same to the last bit", "plugins.md, Further methods")
    def test_a_run_with_another_setting_resumes_to_the_last_bit(self, bench: Bench) -> None:
        for name, other in self.others.items():
            settings = _section(name, other)
            straight = bench.other(name, settings)
            exported = weights(bench.folder / name)
            resumed = bench.resumed(name, settings)
            differs = f"with {self.trainer}.{name} {settings[name]} a resumed run differs in"
            assert without_timings(resumed) == without_timings(straight), (
                f"{differs} its metrics; does `state` return all that the trainer keeps?"
            )
            same = weights(bench.folder / name) == exported
            assert same, f"{differs} its exported weights"

    @promise("every setting has an effect", "testing.md, Trainers")
    def test_every_hyper_parameter_changes_the_loss(self, bench: Bench) -> None:
        config = read_config(self.trainer, overrides=bench.words).config
        names = {*map(setting_name, attrs.fields(type(config.own)))}
        missing = names - {*self.others, *self.without_effect}
        assert not missing, f"give others (or without_effect) a value for {sorted(missing)}"
        unknown = {*self.others, *self.without_effect} - names
        assert not unknown, f"{self.trainer} has no settings {sorted(unknown)}"
        for name, other in self.others.items():
            under = other.under if isinstance(other, Other) else {}
            settings = _section(name, other)
            assert bench.changes_the_loss(name, settings, under), (
                f"{self.trainer}.{name} {settings[name]} does not change the loss"
                f"{bench.about_rollouts(settings)}"
            )

    def _layout(self, name: str = "") -> tuple[str, ...]:
        """Return the words of a layout of the backend, by default of the plainest."""
        every = layouts(self.backend)
        return every[name or next(iter(every))]


def _section(name: str, other: Any) -> dict[str, Any]:
    """Return the fields of the trainer's section with the other value of one of them."""
    if isinstance(other, Other):
        return {**other.under, name: other.value}
    return {name: other}


def bench_of(kit: type[TrainerConformance], folder: Path) -> Bench:
    """Write models and rows into the empty `folder` and return the bench of a subclass."""
    chosen = [] if kit.backend is None else ["--backend", kit.backend]
    request = read_config(kit.trainer, overrides=chosen, inputs=False)
    kind = load_object(request.plugin.trainer)
    rows = kit.rows or rlhf_demo.rows("arithmetic", "train", kind.row_format or "raw")
    needed = NUM_ROWS + NUM_HELD_OUT
    assert len(rows) >= needed, (
        f"{kit.trainer}: the tests train on {NUM_ROWS} rows and hold out {NUM_HELD_OUT}; give "
        f"{needed} rows instead of {len(rows)}"
    )
    models = {
        "model": tiny.make_model(folder / "model"),
        "other_model": tiny.make_model(folder / "other_model", seed=1),
        "ending_model": tiny.make_model(folder / "ending_model", ends_answers=True),
    }
    train = tiny.write_rows(folder / "train.jsonl", rows[:NUM_ROWS])
    held_out = tiny.write_rows(folder / "eval.jsonl", rows[NUM_ROWS:needed])
    words = [
        "--model", str(models["model"]), "--model.dtype", "fp32", "--data.train", str(train),
        "--data.eval", str(held_out), "--data.workers", "0", "--batch.size", "4",
        "--optim.lr", kit.rate, "--optim.clip", kit.clip, "--train.steps", str(NUM_STEPS),
        "--checkpoint.every", "null", *chosen, *(word.format(**models) for word in kit.words),
    ]  # fmt: skip
    trainer = request.trainer  # By which ranks in another folder find a file.
    bench = Bench(trainer, request.name, folder, words, str(folder / "cache"))
    unused = ["--output", str(folder / "unused")]
    bench.longest = tiny.longest_example(
        trainer, [*words, *unused], bench.cache, num_steps=NUM_STEPS
    )
    bench.words += ["--batch.tokens", str(4 * bench.longest)]
    return bench
