"""Rollouts as files of the run: what on-policy trainers write, show at evaluations, and replay."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from attrs import frozen

from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf.rollouts import HELD_OUT, ROLLOUTS, new_file
from rlhf.trainer import Example, Examples, Run, Sample, answer_seeds, prompt_inputs
from rlhf_rollouts.rewards import Scores

PER_PROMPT = {
    "step": pa.int64(),
    "row": pa.string(),
    "columns": pa.string(),
    "prompt": pa.list_(pa.int32()),
    "seeds": pa.list_(pa.int64()),
    "tokens": pa.list_(pa.list_(pa.int32())),
    "logprobs": pa.list_(pa.list_(pa.float32())),
    "finish": pa.list_(pa.string()),
    "text": pa.list_(pa.string()),
    "extra": pa.string(),
    "reward": pa.list_(pa.float64()),
    "version": pa.int64(),
    "images": pa.string(),
}
"""The columns: one row for each prompt, with lists of its answers."""
UNJUDGED = ".unjudged.arrow"
"""How the name of a file ends whose answers have no rewards: it lacks `extra` and `reward`."""
STOP, LENGTH = "stop", "length"
"""Reasons why an answer has ended: by itself, or since it was cut."""
Shown = dict[str, Any]
Rows = list[dict[str, Any]]


@frozen(kw_only=True)
class Rollout:
    """What one call of `Trainer.rollout` has drawn."""

    examples: Sequence[Example]
    """The rows that were answered."""
    groups: Sequence[Sequence[Sample]]
    """The answers to each of them, as many to each."""
    texts: Sequence[str]
    """The text of each answer."""
    scores: Scores | None
    """The rewards of each answer; None if a reward has failed."""
    step: int
    """Optimizer steps before it."""
    seeds: Sequence[int]
    """What `Trainer.rollout` got, one for each row."""
    training: bool
    """Whether it is trained on, and not of an evaluation."""


class RolloutFiles:
    """Writes the rollouts of a run, and shows the answers of its evaluations.

    `serves` is how many steps a rollout of training serves at most, and `same_prompts` whether the
    prompts of rollouts are those of the rows, as they are without environments. Raises RLHFError if
    the run replays another one, whose rollouts are not those of its rows and steps. Collective to
    create and to call.
    """

    def __init__(self, run: Run, *, serves: int | None = None, same_prompts: bool = True) -> None:
        self._run, self._keep = run, run.config.rollouts.keep
        self._serves = serves
        self._held_out: Rows = []
        """The rows of the newest evaluation, on rank 0."""
        self._told = False
        if run.config.rollouts.replay is not None:
            run.on_rank_zero(lambda: check_replay(run, serves, same_prompts), share=False)

    def write(self, rollout: Rollout) -> None:
        """Write a rollout. An evaluation may have several, which become one file when all held-out
        rows are there."""
        self._run.on_rank_zero(lambda: self._write(rollout), share=False)

    @contextmanager
    def kept_if_unjudged(self, rollout: Rollout) -> Iterator[None]:
        """Write a rollout whose rewards fail in this context, and name its file in the error.
        Collective."""
        try:
            yield
        except SameOnAllRanks as error:
            file = self._run.on_rank_zero(lambda: self._write_unjudged(rollout))
            if file is not None:
                error.args = (f"{error}; the answers are in {file}",)
            raise

    def samples(self, number: int) -> list[dict[str, Any]]:
        """Return the answers of the newest evaluation with the highest rewards and those with the
        lowest, `number` in all, on rank 0."""
        ranked = sorted(_scored(self._held_out), key=lambda it: -it[0])
        lowest = min(number, len(ranked)) // 2
        highest = min(number, len(ranked)) - lowest
        chosen = [(f"highest reward {place + 1}", ranked[place]) for place in range(highest)]
        chosen += [(f"lowest reward {place}", ranked[-place]) for place in range(1, lowest + 1)]
        return [self._shown(which, *ranked) for which, ranked in chosen]

    def _shown(self, which: str, reward: float, row: Mapping[str, Any], answer: int) -> Shown:
        prompt = self._run.tokenizer.decode(row["prompt"], skip_special_tokens=True)
        answers, scores = [row["text"][answer]], [reward]
        shown = {
            "which": which, "row": row["row"], "prompt": prompt, "answers": answers,
            "scores": scores,
        }  # fmt: skip
        pictures = self._thumbnails(row["row"]) if row["images"] else []
        return shown | {"images": pictures} if pictures else shown

    def _thumbnails(self, row: str) -> list[str]:
        """Return small pictures of the images of a held-out row."""
        held_out = self._run.examples[1]
        number = next(number for number in range(len(held_out)) if held_out.name(number) == row)
        return held_out.thumbnails(number)

    def _file(self, rollout: Rollout, end: str) -> Path:
        """Return the file of a rollout whose name ends with `end`."""
        assert self._run.folder is not None, "a rehearsal makes no rollouts"
        name = f"{rollout.step + 1}" if rollout.training else f"{HELD_OUT}{rollout.step}"
        return self._run.folder / ROLLOUTS / f"{name}{end}"

    def _write_unjudged(self, rollout: Rollout) -> Path | None:
        """Write a rollout without rewards, of an evaluation also those before it. Return its file;
        None if there is none, since no rollouts are kept or the disk has no room, which is not what
        has failed first."""
        file, rows = self._file(rollout, UNJUDGED), rows_of(rollout)
        if self._keep == 0:
            return None
        earlier = [] if rollout.training else self._earlier(rows)
        rows = [{name: row[name] for name in rows[0]} for row in earlier] + rows
        try:
            write_rows(rows, file)
        except RLHFError:
            return None
        return file

    def _write(self, rollout: Rollout) -> None:
        rows = rows_of(rollout)
        if not rollout.training:
            rows = self._held_out = self._earlier(rows) + rows
        complete = rollout.training or len(rows) == len(self._run.examples[1])
        if self._keep == 0 or not complete:
            return
        file = self._file(rollout, ".arrow")
        write_rows(rows, file)
        self._file(rollout, UNJUDGED).unlink(missing_ok=True)
        if self._keep is not None:
            files = recorded(file.parent, held_out=not rollout.training)
            for step in sorted(files)[: -self._keep]:
                files[step].unlink()
        if rollout.training and not self._told:
            self._told = True
            self._run.notes.append(self._note(file))

    def _earlier(self, rows: Rows) -> Rows:
        """Return what is known of the evaluation that `rows` continue."""
        known = self._held_out
        if not known or known[0]["step"] != rows[0]["step"]:
            return []
        again = any(row["row"] == rows[0]["row"] for row in known)
        return [] if again else known

    def _note(self, file: Path) -> str:
        """Return what the run prints of its first file."""
        size = file.stat().st_size / 1e6
        line = f"rollouts   {megabytes(size)} in {file}"
        if self._keep is not None:
            return f"{line}; the newest {self._keep} are kept"
        most = size * self._run.steps / (self._serves or 1)
        return f"{line}; about {megabytes(most)} for all steps, which rollouts.keep limits"


def megabytes(size: float) -> str:
    """Return a size in megabytes as text."""
    return f"{size:,.0f} MB" if size >= 10 else f"{size:.2g} MB"


def rows_of(rollout: Rollout) -> Rows:
    """Return the rows of the file."""
    rows, done = [], 0
    for example, seed, group in zip(rollout.examples, rollout.seeds, rollout.groups, strict=True):
        part = slice(done, done + len(group))
        done = part.stop
        rows.append(
            {
                "step": rollout.step + rollout.training,
                "row": example.row,
                "columns": json.dumps(dict(example.columns)),
                "prompt": np.asarray(example.prompt, np.int32),
                "seeds": answer_seeds([seed], len(group)),
                "tokens": [np.asarray(sample.tokens, np.int32) for sample in group],
                "logprobs": [np.asarray(sample.logprobs, np.float32) for sample in group],
                "finish": [STOP if sample.finished else LENGTH for sample in group],
                "text": list(rollout.texts[part]),
                "version": rollout.step if group[0].version is None else group[0].version,
                "images": digest_of(prompt_inputs(example)),
                **({} if rollout.scores is None else judged_columns(rollout.scores, part)),
            }
        )
    return rows


def judged_columns(scores: Scores, part: slice) -> dict[str, Any]:
    """Return the columns that have the rewards of some answers, those to one prompt."""
    extra = {name: values[part] for name, values in scores.columns.items()}
    by_name = {f"reward/{name}": values[part] for name, values in scores.by_name.items()}
    return {"extra": json.dumps(extra), "reward": scores.total[part], **by_name}


def digest_of(inputs: Mapping[str, Any]) -> str:
    """Return a digest of the inputs of a prompt; empty if there are none."""
    if not inputs:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(inputs):
        array = np.ascontiguousarray(inputs[name])
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(array.data)
    return digest.hexdigest()


def write_rows(rows: Rows, file: Path) -> None:
    """Write the rows of a rollout as an Arrow file, whole. Each `reward/NAME` is a column beside
    those of `PER_PROMPT`."""
    scores = [name for name in rows[0] if name not in PER_PROMPT]
    known = {name: kind for name, kind in PER_PROMPT.items() if name in rows[0]}
    kinds = known | dict.fromkeys(scores, pa.list_(pa.float64()))
    columns = {name: pa.array([row[name] for row in rows], kind) for name, kind in kinds.items()}
    table, options = pa.table(columns), pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        new_file(file) as part,
        pa.OSFile(str(part), "wb") as sink,
        pa.ipc.new_file(sink, table.schema, options=options) as writer,
    ):
        writer.write_table(table)


def read_columns(file: Path, *names: str) -> pa.Table:
    """Return those of these columns that a file has: older ones have no `version` and no `images`.
    Raises RLHFError if it cannot be read."""
    try:
        with pa.memory_map(str(file)) as source:
            known = pa.ipc.open_file(source).schema.names
            places = [known.index(name) for name in names if name in known]
            options = pa.ipc.IpcReadOptions(included_fields=places)
            with pa.ipc.open_file(source, options=options) as opened:
                return opened.read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise RLHFError(f"cannot read {file} ({error}); replay another run") from error


def recorded(folder: Path, *, held_out: bool = False) -> dict[int, Path]:
    """Return the files of a folder by step: those of training, or of evaluations."""
    start = HELD_OUT if held_out else ""
    found = ((path.stem.removeprefix(start), path) for path in folder.glob(f"{start}*.arrow"))
    return {int(step): path for step, path in found if step.isdecimal()}


def check_replay(run: Run, serves: int | None, same_prompts: bool) -> None:
    """Raise RLHFError unless the run that is replayed has rollouts for all steps of this one, of
    the same prompts if they are those of the rows."""
    source = Path(str(run.config.rollouts.replay))
    folder = source / ROLLOUTS
    files = recorded(folder)
    if not files:
        raise RLHFError(f"rollouts.replay: {folder} has no rollouts; choose the folder of a run")
    if run.folder is not None and source.resolve() == run.folder.resolve():
        raise RLHFError(
            f"rollouts.replay {source} is the folder of this run; choose another output"
        )
    if serves is not None:
        last = min(run.steps, run.config.train.stop_at or run.steps)
        missing = first_missing(sorted(files), serves, last)
        if missing is not None:
            raise RLHFError(
                f"rollouts.replay: {folder} has no rollout for step {missing} of {last}; replay a "
                "run that has all of them, or set train.stop_at"
            )
    if same_prompts:
        check_prompts(run.examples[0], [files[step] for step in sorted(files)])


def first_missing(steps: Sequence[int], serves: int, last: int) -> int | None:
    """Return the first step up to `last` that no rollout serves, of rollouts before `steps`."""
    covered = 0
    for step in [*steps, last + 1]:
        if covered < min(step, last + 1) - 1:
            return covered + 1
        covered = max(covered, step + serves - 1)
    return None


def check_prompts(examples: Examples, files: Iterable[Path]) -> None:
    """Raise RLHFError for a row that the files answer and whose prompt is another one now, or has
    other images."""
    known: dict[str, set[tuple[bytes, str]]] = {}
    for number, example in enumerate(examples):
        prompt = np.asarray(example.prompt, np.int32).tobytes()
        images = digest_of(prompt_inputs(example))
        known.setdefault(examples.name(number), set()).add((prompt, images))
    for file in files:
        table = read_columns(file, "row", "prompt", "images")
        for row, prompt, images in zip(
            table["row"].to_pylist(), table["prompt"], images_of(table), strict=True
        ):
            # Rows may be in another place now: then the engine compares them.
            if row in known and (prompt.values.to_numpy().tobytes(), images) not in known[row]:
                raise RLHFError(
                    f"rollouts.replay: {file} answers another prompt than {row} has now; replay a "
                    "run with the same rows, tokenizer and chat template"
                )


def images_of(table: pa.Table) -> list[str]:
    """Return the digest of the images of each row of a file."""
    has_column = "images" in table.column_names
    return table["images"].to_pylist() if has_column else [""] * table.num_rows


def _scored(rows: Rows) -> Iterator[tuple[float, dict[str, Any], int]]:
    """Yield each answer that has a reward: the reward, its row, and its number."""
    for row in rows:
        for answer, reward in enumerate(row["reward"]):
            if not np.isnan(reward):
                yield float(reward), row, answer
