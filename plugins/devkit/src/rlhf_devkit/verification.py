"""`rlhf verify`: two steps of a configuration on this machine, in another layout, and stopped and
resumed."""

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Literal

import attrs
from attrs import frozen

from rlhf.api import num_ranks
from rlhf.config.sections import Config, Observers
from rlhf.errors import RLHFError, counted
from rlhf.folder.checkpoints import step_folder
from rlhf.folder.disk import existing, writing
from rlhf.folder.run_folder import RANKS, RECORDED, logged, read_json
from rlhf.launch.hosts import join_slurm, this_host
from rlhf.launch.local import Ranks, num_devices
from rlhf.launch.signals import DAY, STOPPED, catch
from rlhf.registry.gateway import load_hooks
from rlhf.request.reader import Request, handed_over
from rlhf.train.dataset import Dataset, prepare_data
from rlhf_devkit.comparison import (
    BOUNDS,
    STEPS,
    first_changed,
    first_difference,
    largest_difference,
    losses,
)

PREFIX, OUTPUT = ".verify-", "output.txt"
SHARDED = 2
"""The stage that a configuration without sharding is compared with."""


@frozen(kw_only=True)
class RunShape:
    """What the curve of a run must not depend on."""

    ranks: int
    stage: Any
    """The backend's section of the configuration, which has the stage."""
    tokens: int | Literal["auto"]
    """`batch.tokens`."""


class RunFailed(Exception):
    """A run ended with an exit code other than 0."""

    def __init__(self, name: str, code: int, output: str) -> None:
        match = re.search("^(error: |(?=Traceback))", output, re.MULTILINE)
        super().__init__(f"the run '{name}' failed: {output[match.end() if match else 0 :]}")
        self.code = code


def verify_command(request: Request) -> int:
    """Print what is the same and what differs; returns the exit code 0, 1 for a difference, or that
    of a run that failed."""
    join_slurm()
    host = this_host()
    if "RANK" in os.environ or host.hosts > 1:
        raise RLHFError(
            "rlhf verify starts its own ranks on one machine; run it without a launcher"
        )
    config = request.config
    layout = RunShape(
        ranks=num_ranks(request, host), stage=config.backend_section, tokens=config.batch.tokens
    )
    request = attrs.evolve(request, config=two_steps(config))
    data = prepare_data(request)
    output = Path(config.output or ".")
    with writing(output):
        folder = existing(output)
    try:
        with writing(folder), catch(leave), TemporaryDirectory(prefix=PREFIX, dir=folder) as path:
            return Verification(request, data, Path(path), layout).verify()
    except RunFailed as failure:
        print(f"error: {failure}", file=sys.stderr, end="")
        return failure.code


def two_steps(config: Config) -> Config:
    """Return the configuration of a run of two steps at the full learning rate, without evaluations
    and observers."""
    return attrs.evolve(
        config,
        data=attrs.evolve(config.data, eval=()),
        optim=attrs.evolve(config.optim, warmup=0.0),
        train=attrs.evolve(
            config.train,
            steps=STEPS,
            stop_at=None,
            hours=None,
            log_every=1,
            eval_every=None,
            eval_at_start=False,
            patience=None,
            samples=0,
        ),
        checkpoint=attrs.evolve(config.checkpoint, every=1, keep=STEPS, best=None),
        observers=Observers(),
    )


def leave(number: int, frame: FrameType | None) -> None:
    """End after a signal between two runs, with the temporary folder removed."""
    raise SystemExit(STOPPED)


@frozen
class Verification:
    """The runs of one `rlhf verify` and their comparison."""

    request: Request
    data: Dataset
    folder: Path
    layout: RunShape
    """As configured."""

    def verify(self) -> int:
        """Take the runs and print what they show. Returns 0, or 1 for a difference."""
        # It saves only at the end, so that a save that changes what follows it would be seen.
        straight = self._run("straight", self.layout, checkpoint={"every": None})
        stopped = self._run("resumed", self.layout, label="stopped", train={"stop_at": 1})
        first = step_folder(Path("checkpoints"), 1)
        (straight / first).symlink_to(stopped / first)
        curve = self._compare_layouts(straight)
        self._run("resumed", self.layout, resume="")
        resume = self._compare_resumed(straight)
        versions = json.loads((straight / "versions.json").read_text(encoding="utf-8"))
        named = [f"{name} {versions[name]}" for name in ("python", *RECORDED) if name in versions]
        show("versions", ", ".join(named))
        print(f"{curve}, {resume}")
        return int("differs" in curve + resume)

    def _compare_layouts(self, straight: Path) -> str:
        """Compare with a run in another layout; if it differs, with one for each change. Returns
        the result in words."""
        if reason := recorded(straight)["curve"] or self._not_comparable(straight):
            return f"curve not compared (it {reason})"
        other, folder = self._run_other(straight)
        apart = largest_difference(folder, straight)
        same = self._same_curve(folder, straight)
        # Not as configured: a backend may shard only on several ranks.
        varied = {
            "ranks": other.ranks != self.layout.ranks,
            "stage": stage_of(folder) != stage_of(straight),
            "batch.tokens": other.tokens != self.layout.tokens,
        }
        shutil.rmtree(folder)
        changes = {
            name: value
            for name, value in attrs.asdict(other, recurse=False).items()
            if value != getattr(self.layout, name)
        }
        for name, value in changes.items() if not same and len(changes) > 1 else ():
            single = self._run(f"by {name}", attrs.evolve(self.layout, **{name: value}))
            self._same_curve(single, straight)
            shutil.rmtree(single)
        if not same:
            return "the curve differs"
        kept = [name for name, is_varied in varied.items() if not is_varied]
        note = f" ({listed(kept)} not varied)" if kept else ""
        over = listed([name for name, is_varied in varied.items() if is_varied])
        return f"same curve to {digits(apart)} over {over}{note}"

    def _run_other(self, straight: Path) -> tuple[RunShape, Path]:
        """Take the run that differs most from `straight` and fits the accelerators. Returns its
        layout too."""
        other = self._other_layout(straight)
        try:
            return other, self._run("other", other)
        except RunFailed as failure:
            if "out of memory" not in str(failure):
                raise
            show("other", "out of memory; this one has the configured stage")
            other = attrs.evolve(other, ranks=self._fewer_ranks(), stage=self.layout.stage)
            return other, self._run("other", other, overwrite=True)

    def _fewer_ranks(self) -> int:
        """Return the next smaller number of ranks that the axes divide, or all."""
        numbers = range(self.layout.ranks - 1, 0, -1)
        return next(filter(self._divides, numbers), self.layout.ranks)

    def _divides(self, ranks: int) -> bool:
        hooks, _ = load_hooks(self.request.config)
        try:
            hooks.axis_sizes(config=self.request.config, ranks=ranks)
        except RLHFError:
            return False
        return True

    def _other_layout(self, straight: Path) -> RunShape:
        """Return a layout with another number of ranks, stage and budget."""
        layout, tokens = self.layout, self.data.largest(self.request.config)
        configured = self.data.with_token_budget(self.request.config).batch.budget
        on_cpu = recorded(straight)["devices"].endswith("cpu")
        most = 2 if on_cpu else num_devices()
        if tokens == configured:
            tokens *= 2
        stage = layout.stage
        if "stage" in attrs.fields_dict(type(stage)):
            stage = type(stage)(stage=0 if stage_of(straight) else SHARDED)
        ranks = 1 if layout.ranks > 1 else min(2, most)
        if not self._divides(ranks):
            ranks = self._fewer_ranks()
        return RunShape(ranks=ranks, stage=stage, tokens=tokens)

    def _same_curve(self, run: Path, straight: Path, steps: range = range(STEPS)) -> bool:
        """Return whether two runs differ by no more than rounding, and print where they do."""
        config = self.request.config
        difference = first_difference(
            run,
            straight,
            BOUNDS[config.model.dtype],
            weights=config.optim.states == "fp32",
            steps=steps,
        )
        if difference:
            show("", f"differs in {difference}")
        return not difference

    def _compare_resumed(self, straight: Path) -> str:
        """Compare the run that was stopped and resumed with `straight`, in words."""
        resumed = self.folder / "resumed"
        changed = first_changed(resumed, straight)
        if not changed:
            return "resume exact"
        if recorded(straight)["devices"].endswith("cpu") or self.request.config.train.deterministic:
            show("", f"differs in {changed}")
            return "resume differs"
        if not self._same_curve(resumed, straight, range(1, STEPS)):
            return "resume differs"
        apart = digits(largest_difference(resumed, straight))
        return f"resume to {apart} (exact only with train.deterministic)"

    def _not_comparable(self, straight: Path) -> str:
        """Return why the curves of two layouts say nothing, if they do not."""
        if skipped := logged(straight, until=STEPS)[-1].get("skipped_steps"):
            return f"skipped {skipped} of {STEPS} steps to lower the loss scale of fp16"
        if self.data.trainer.needs_rollout() and self.request.config.model.dtype != "fp32":
            return "depends on rounding: answers are sampled, and not in fp32"
        return ""

    def _run(
        self,
        name: str,
        layout: RunShape,
        *,
        label: str = "",
        resume: str | None = None,
        overwrite: bool = False,
        **changes: Mapping[str, Any],
    ) -> Path:
        """Take a run into the folder `name`, with `changes` of sections; print its losses and
        return the folder. Raises RunFailed."""
        config, folder = self.request.config, self.folder / name
        folder.mkdir(exist_ok=True)
        changes = {"batch": {"tokens": layout.tokens}, **changes}
        sections = {key: attrs.evolve(getattr(config, key), **it) for key, it in changes.items()}
        sections[config.backend_name] = layout.stage
        config = attrs.evolve(config, output=str(folder), **sections)
        request = attrs.evolve(self.request, config=config, resume=resume, overwrite=overwrite)
        command = [sys.executable, "-m", "rlhf", "run", request.name]
        with (folder / OUTPUT).open("wb") as output:
            code = Ranks(
                command,
                layout.ranks,
                config.checkpoint.stop_timeout,
                signals=config.checkpoint.stop_signals,
                places_in=folder / RANKS,
                output=output,
                variables={DAY: self.data.day.isoformat()},
                request=handed_over(request),
            ).wait()
        if code == STOPPED:
            raise SystemExit(STOPPED)
        if code:
            raise RunFailed(name, code, (folder / OUTPUT).read_text(encoding="utf-8"))
        show(label or name, describe(folder, layout))
        return folder


def show(label: str, text: str) -> None:
    """Print a result in lines of at most 100 characters."""
    first, rest = f"{label:10} ", " " * 11
    print(textwrap.fill(text, 100, initial_indent=first, subsequent_indent=rest), flush=True)


def describe(run: Path, layout: RunShape) -> str:
    """Return a run's layout and losses."""
    where = f"{counted(layout.ranks, 'rank')}, stage {stage_of(run)}"
    values = ", ".join(f"{value:.6f}" for value in losses(run))
    return f"{where}, batch.tokens {layout.tokens}: loss {values}"


def listed(names: Sequence[str]) -> str:
    """Return names in words: `a`, `a and b` or `a, b and c`."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def stage_of(run: Path) -> int:
    """Return the stage that the backend chose, or of one without stages whether it shards."""
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))["policy"]
    return int(plan.get("stage", plan["sharded"]))


def recorded(run: Path) -> dict[str, Any]:
    """Return what the folder of a run says of it as a whole."""
    return read_json(run / "summary.json")


def digits(value: float) -> str:
    """Return a difference with one digit: 4e-6."""
    return f"{value:.0e}".replace("e-0", "e-") if value else "the last bit"
