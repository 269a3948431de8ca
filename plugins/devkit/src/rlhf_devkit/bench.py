"""The inputs of one trainer's conformance tests, and the runs that its tests share."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import define, field

from rlhf.plugin import BackendPlugin
from rlhf.registry.imports import load_record
from rlhf.registry.installed import find_backend
from rlhf.request.reader import read_config
from rlhf.request.words import option
from rlhf.train.dataset import prepare_data
from rlhf_devkit import tiny
from rlhf_devkit.curves import Metrics, column
from rlhf_devkit.once import Once
from rlhf_devkit.ranks import shared

NUM_ROWS, NUM_HELD_OUT = 22, 7
"""Neither divides by the batch of 4."""
NUM_STEPS, STOP_AT = 8, 4
"""The epoch ends after 6 steps: the stop lies inside the first, the end inside the second."""
NUM_FIRST = 2
"""The steps in which most settings change the loss."""
ENDING = ("--train.stop_at", "2", "--batch.size", "8", "--optim.lr", "1e-4")
"""Words of a run in which the model ends its answers: learnt fast, all would soon end at once."""
TRAINERS = Path(__file__).with_name("trainers")
LIKELIHOOD = f"{TRAINERS / 'likelihood.py'}:Likelihood"
"""The trainer with which kits run observers and extensions, for `rlhf run`."""
SEVERAL = f"{TRAINERS / 'several.py'}:Several"
"""A trainer of several models, with which the kit of backends makes runs."""


def layouts(backend: str | None = None) -> dict[str, tuple[str, ...]]:
    """Return the words of a command line for each layout that the record of a backend calls
    `tested`; None is the only backend that is installed."""
    plugin = find_backend(backend)
    tested = load_record(plugin).tested
    return {name: words_of(plugin.name, tested[name]) for name in tested}


@define
class Bench:
    """Model, rows and command line of one trainer's tests, and the runs made so far."""

    trainer: str
    section: str
    """Name of the trainer's section."""
    folder: Path
    words: list[str]
    """The command line of every run, without `--output`."""
    cache: str
    longest: int = 0
    """Tokens of the largest example, that of a rollout included."""
    backend: tuple[str, BackendPlugin] | None = None
    """Name and record of a backend that need not be installed."""
    _runs: Once = field(factory=Once)

    def plain(
        self,
        name: str = "plain",
        *words: str,
        to: str = "",
        observers: Mapping[str, object] = MappingProxyType({}),
    ) -> Metrics:
        """Return the metrics of a run in plain torch, by default of that with which all others are
        compared. It is made once by this name, in the folder `to` or `name`."""
        arguments = self._to(to or name, *words)
        return self._once(
            name,
            lambda: tiny.run(self.trainer, arguments, self.cache, True, observers, self.backend),
        )

    def run(self, name: str, world: int, *words: str) -> Metrics:
        """Return the metrics of a run through the backend on `world` ranks, made once by this
        name."""
        return self._once(name, lambda: self.start(name, world, *words))

    def start(self, name: str, world: int, *words: str) -> Metrics:
        """Run through the backend on `world` ranks, into the folder `name`."""
        arguments = self._to(name, *words)
        metrics: Metrics = shared(world).run(
            tiny.run, self.trainer, arguments, self.cache, False, {}, self.backend
        )[0]
        return metrics

    def other(self, name: str, settings: Mapping[str, Any]) -> Metrics:
        """Return the metrics of a run in plain torch with these fields in the trainer's section,
        made once by this name. It has a checkpoint of its step `STOP_AT`."""
        return self.plain(name, *self._other(settings))

    def changes_the_loss(
        self, name: str, settings: Mapping[str, Any], under: Mapping[str, Any]
    ) -> bool:
        """Return whether runs in plain torch with `settings` and with `under` in the trainer's
        section have different losses. `name` is that of `other`."""
        before = f"before {name}" if under else "plain"
        # Most settings show in the first steps, for which no whole run is made.
        has_run = self._runs.has(_run(name))
        first = self._first_losses
        if not has_run and first(name, settings) != first(before, under):
            return True
        run = self.other(before, under) if under else self.plain()
        return column(self.other(name, settings), "loss") != column(run, "loss")

    def _first_losses(self, name: str, settings: Mapping[str, Any]) -> list[float]:
        """Return the losses of the first steps in plain torch, without a run folder."""
        arguments = self._to("unused", *words_of(self.section, settings))
        moments = self._runs.get(
            f"the first steps of '{name}'",
            lambda: tiny.first_steps(self.trainer, arguments, self.cache, num_steps=NUM_FIRST),
        )
        return [moment.loss for moment in moments]

    def resumed(self, name: str, settings: Mapping[str, Any]) -> Metrics:
        """Resume the run of `other` with this name at its checkpoint and return its metrics."""
        words = (*self._other(settings), "--resume", f"step-{STOP_AT:06}")
        return self.plain(f"{name}, resumed", *words, to=name)

    def _other(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        return (*words_of(self.section, settings), "--checkpoint.every", str(STOP_AT))

    def samples(self, settings: Mapping[str, Any]) -> bool:
        """Return whether the trainer has a rollout with these fields in its section."""
        arguments = self._to("unused", *words_of(self.section, settings))
        return prepare_data(read_config(self.trainer, overrides=arguments)).trainer.needs_rollout()

    def about_rollouts(self, settings: Mapping[str, Any]) -> str:
        """Return why a setting may not act on a trainer with a rollout, with these fields in its
        section: too few rollouts, or answers of which none ends. Empty if neither is so."""
        arguments = self._to("unused", *words_of(self.section, settings))
        number, samples = tiny.rollouts(self.trainer, arguments, self.cache, num_steps=NUM_STEPS)
        reasons = []
        if number == 1:
            reasons.append(f"one rollout serves all {NUM_STEPS} steps")
        if samples and not any(sample.finished for sample in samples):
            reasons.append(
                f"none of its {len(samples)} answers ends with EOS, which `{{ending_model}}` often "
                "writes"
            )
        return "".join(f"; {reason}" for reason in reasons)

    def ending(
        self, settings: Mapping[str, Any], world: int, *layout: str
    ) -> tuple[Metrics, Metrics]:
        """Return the metrics of two steps on `world` ranks and in plain torch, with these fields in
        the trainer's section and a model that ends its answers.

        `batch.tokens` is the least, so that each rank answers other prompts.
        """
        model = self.folder / "ending_model"
        words = ["--model", str(model), *words_of(self.section, settings), *ENDING]
        arguments = self._to("unused", *words)
        longest = tiny.longest_example(self.trainer, arguments, self.cache, num_steps=2)
        words += ["--batch.tokens", str(max(longest, self.longest))]
        arguments = self._to("ending on ranks", *words, *layout)
        metrics = shared(world).run(tiny.run_without_room, self.trainer, arguments, self.cache)[0]
        return metrics, self.plain("ending in plain torch", *words)

    def _to(self, name: str, *words: str) -> list[str]:
        return [*self.words, "--output", str(self.folder / name), *words]

    def _once(self, name: str, make: Callable[[], Metrics]) -> Metrics:
        return self._runs.get(_run(name), make)


def _run(name: str) -> str:
    return f"the run '{name}'"


def words_of(section: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of a command line for these fields of a section."""
    return tuple(option(f"{section}.{name}", value) for name, value in settings.items())
