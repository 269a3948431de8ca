"""Rows to examples: once, in parallel processes, kept in a cache that is addressed by content."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rlhf.config.sections import Config, DataConfig
from rlhf.data import trees
from rlhf.data.cache import key, once
from rlhf.data.example import ExampleMaker
from rlhf.data.examples import NAMED_ROWS, Examples, Part, Report
from rlhf.data.file_types import TEXT
from rlhf.data.files import Source
from rlhf.data.folders import quiet
from rlhf.data.images import Images
from rlhf.data.mapping import RowsToTrees
from rlhf.data.rows import RowReader, load_format
from rlhf.errors import RLHFError
from rlhf.launch.caches import cache_root

if TYPE_CHECKING:
    import datasets

BATCH_ROWS = 256
IMAGE_ROWS = 8
"""Rows of a batch in data that may have images, all of which are in memory."""
MAY_HAVE_IMAGES = r'"images?"\s*:|"(image|image_url|input_image)"'
"""What the JSON of a row with images has."""
IMAGES = "images.json"
"""The file of the cache with the digests of the reader and of the files of images."""
NEWEST = "newest.json"
"""The file with digests of those files of images that were written anew since."""
ROWS_PER_PROCESS = 2000
"""Fewer rows do not pay for another process."""
IMAGE_ROWS_PER_PROCESS = 100
"""The same with images, one of which takes 0.02 s at 640 x 480 pixels (Qwen2.5-VL, without
torchvision)."""


def prepare(config: Config, trainer: ExampleMaker, tokenizer: Any, *, which: str) -> Examples:
    """Return the examples of `data.train` or `data.eval` (`which`), from the cache if possible.

    Needs no process group: one of several processes tokenises and the others wait for its file.
    Raises RLHFError for rows that cannot be read, for data without a trainable row, and for an
    example larger than `batch.tokens`.
    """
    format = trainer.row_format or "raw"
    made = [
        _prepare_entry(Source(entry, which, format), place, config, trainer, tokenizer)
        for place, entry in enumerate(getattr(config.data, which))
    ]
    report = sum((other for _, other in made[1:]), made[0][1])
    _check_not_empty(report, config.data, which)
    parts = [part for part, _ in made if len(part.take)]
    examples = Examples(parts, report)
    _check_placeholders(examples, parts, tokenizer)
    _check_budget(examples, config.batch.tokens)
    return examples


def _prepare_entry(
    source: Source, place: int, config: Config, trainer: ExampleMaker, tokenizer: Any
) -> tuple[Part, Report]:
    entry, data, seed = source.entry, config.data, [config.train.seed, place]
    images = Images(config.model, tokenizer, source.folder)
    key_with = functools.partial(
        key,
        trainer,
        tokenizer,
        rows=source.digest(),
        format=source.format,
        entry=attrs.asdict(attrs.evolve(entry, path="", weight=1.0)),
        sample=[entry.weight, seed] if entry.weight < 1 else None,
        limits=[data.max_tokens, data.too_long, data.bad_images],
    )

    def build(folder: Path) -> None:
        # Outside of `folder`: NFS keeps files that are still mapped under other names.
        with tempfile.TemporaryDirectory(
            prefix=f"{folder.name}-rows-", dir=folder.parent, ignore_cleanup_errors=True
        ) as scratch:
            rows = source.read(Path(scratch))
            numbers = _sample(min(len(rows), entry.limit or len(rows)), entry.weight, seed)
            # Each process loads a reader of its own.
            reader = _reader(trainer, tokenizer, data, attrs.evolve(images))
            mapping = RowsToTrees(source, numbers, data, trainer, reader)
            table = _tokenised(rows, mapping, Path(scratch))
            trees.write(table, folder / "examples.arrow")
            report = json.dumps(attrs.asdict(_report(table)))
            (folder / "report.json").write_text(report, encoding="utf-8")
            if files := [text for text in table["files"].unique().to_pylist() if text]:
                read = {name: digest for text in files for name, digest in json.loads(text).items()}
                own = {name: getattr(images.reader, name) for name in ("digest", "feature")}
                content = {**own, "files": read}
                (folder / IMAGES).write_text(json.dumps(content), encoding="utf-8")

    folder = once(cache_root() / "examples" / key_with(), build)
    if (folder / IMAGES).exists():
        content = json.loads((folder / IMAGES).read_text(encoding="utf-8"))
        newest = folder / NEWEST
        if changes := images.changes(content["digest"], content["files"], newest):
            folder = once(cache_root() / "examples" / key_with(images=changes), build)
    report = Report(**json.loads((folder / "report.json").read_text(encoding="utf-8")))
    lost = {
        why: tuple(source.name + place for place in places) for why, places in report.lost.items()
    }
    report = attrs.evolve(report, lost=lost)
    take = _repeat(report.examples, entry.weight, seed)
    return Part(folder / "examples.arrow", source.name, take), report


def _sample(count: int, weight: float, seed: Sequence[int]) -> NDArray[np.int64]:
    """Return the rows to read, in the order of the file: all, or a share drawn by the seed."""
    if weight >= 1:
        return np.arange(count)
    drawn = np.random.Generator(np.random.PCG64([*seed, 1])).permutation(count)
    return np.sort(drawn[: max(1, round(count * weight))])


def _repeat(count: int, weight: float, seed: Sequence[int]) -> NDArray[np.int64]:
    """Return the examples to take: each as often as the integer part of the weight says, and a
    random share once more."""
    if weight <= 1:
        return np.arange(count)
    whole = int(weight)
    drawn = np.random.Generator(np.random.PCG64([*seed, 2])).permutation(count)
    extra = np.sort(drawn[: round(count * (weight - whole))])
    return np.concatenate([np.tile(np.arange(count), whole), extra])


def _reader(
    trainer: ExampleMaker, tokenizer: Any, data: DataConfig, images: Images
) -> RowReader | None:
    """Return a reader of the trainer's row format, if it names one."""
    if trainer.row_format is None:
        return None
    return load_format(trainer.row_format).open(
        tokenizer, whole=trainer.renders_whole, section=trainer.config,
        template=data.chat_template or "", images=images,
    )  # fmt: skip


def _may_have_images(rows: datasets.Dataset) -> bool:
    """Return whether any row may have images: by its JSON, or by the names of columns."""
    if TEXT not in str(rows.features):
        return "image" in str(rows.features)
    table = rows.data.table
    texts = [table[TEXT]] if TEXT in table.column_names else [
        pc.struct_field(table[name], TEXT)
        for name in table.column_names
        if pa.types.is_struct(table[name].type) and table[name].type.get_field_index(TEXT) >= 0
    ]  # fmt: skip
    return any(pc.any(pc.match_substring_regex(text, MAY_HAVE_IMAGES)).as_py() for text in texts)


def _tokenised(rows: datasets.Dataset, mapping: RowsToTrees, scratch: Path) -> pa.Table:
    numbers = mapping.numbers
    if not len(numbers):
        return trees.to_table([])
    if len(numbers) < len(rows):
        rows = rows.select(numbers)
    wanted = mapping.data.processes or len(os.sched_getaffinity(0))
    pictured = _may_have_images(rows)
    enough = IMAGE_ROWS_PER_PROCESS if pictured else ROWS_PER_PROCESS
    processes = min(wanted, len(numbers) // enough)
    if processes > 1:
        # A forked process cannot end what an earlier run has left, such as groups with threads.
        gc.collect()
    with contextlib.nullcontext() if sys.stderr.isatty() else quiet():
        done = rows.with_format("arrow").map(
            mapping,
            batched=True,
            batch_size=IMAGE_ROWS if pictured else BATCH_ROWS,
            with_indices=True,
            num_proc=processes if processes > 1 else None,
            cache_file_name=str(scratch / "part.arrow"),
            new_fingerprint=scratch.name.rpartition("-")[2],  # Short: 64 characters at most.
            load_from_cache_file=False,
            desc=f"tokenising {mapping.source.entry.path}",
        )
    return done.data.table


def _report(table: pa.Table) -> Report:
    """Return the counts of a table of trees, including dropped ones."""
    column = {name: table[name].to_numpy() for name in trees.NUMBERS}
    kept = column["status"] <= trees.CUT
    rows, counts = np.unique(column["row"], return_counts=True)
    codes = {
        "too_long": trees.TOO_LONG, "cut": trees.CUT, "empty": trees.EMPTY,
        "bad_images": trees.BAD_IMAGES,
    }  # fmt: skip
    lost = {name: np.flatnonzero(column["status"] == code) for name, code in codes.items()}

    return Report(
        rows=len(rows),
        examples=int(kept.sum()),
        **{name: len(numbers) for name, numbers in lost.items()},
        split=int((counts > 1).sum()),
        tokens=int(column["length"][kept].sum()),
        trained=int(column["predictions"][kept].sum()),
        labels=int(column["labels"].sum()),
        labels_cut=int(column["labels_cut"].sum()),
        lost={
            name: tuple(table["place"][number].as_py() for number in numbers[:NAMED_ROWS].tolist())
            for name, numbers in lost.items()
            if len(numbers)
        },
    )


def _check_not_empty(report: Report, data: DataConfig, which: str) -> None:
    if report.examples:
        return
    if not report.rows:
        paths = ", ".join(entry.path for entry in getattr(data, which))
        raise RLHFError(f"data.{which}: no rows in {paths}")
    reasons = []
    if report.too_long:
        rows = ", ".join(report.lost["too_long"])
        reasons.append(f"{report.too_long} longer than data.max_tokens {data.max_tokens} ({rows})")
    if report.empty:
        rows = ", ".join(report.lost["empty"])
        reasons.append(f"{report.empty} with nothing to train on ({rows})")
    if report.bad_images:
        reasons.append(
            f"{report.bad_images} with bad images ({', '.join(report.lost['bad_images'])})"
        )
    raise RLHFError(f"data.{which}: no trainable rows left of {report.rows}: {', '.join(reasons)}")


def _check_placeholders(examples: Examples, parts: Sequence[Part], tokenizer: Any) -> None:
    """Raise RLHFError for a row without images, next to others, that has the token of one."""
    paths = [path for part in parts if (path := part.file.with_name(IMAGES)).exists()]
    if not paths or not examples.files[0].arrays:
        return
    feature = json.loads(paths[0].read_text(encoding="utf-8"))["feature"]
    for part, file in zip(parts, examples.files, strict=True):
        wrong = np.flatnonzero(file.with_token(feature) & (file.input_bytes == 0)).tolist()
        if wrong:
            raise RLHFError(
                f"{part.source}{file.text('place', wrong[0])}: the row has "
                f"{tokenizer.convert_ids_to_tokens(feature)}, which stands for an image, but no "
                "image; remove it from the text, or remove the row"
            )


def _check_budget(examples: Examples, tokens: int | Literal["auto"]) -> None:
    largest = int(examples.lengths.argmax())
    size = int(examples.lengths[largest])
    if isinstance(tokens, int) and size > tokens:
        raise RLHFError(
            f"{examples.name(largest)}: the example has {size} tokens, more than batch.tokens "
            f"{tokens}; set batch.tokens to at least {size} or lower data.max_tokens"
        )
