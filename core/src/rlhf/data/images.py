"""Rows with images: the border between core and the distribution that reads them."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from os import getpid
from pathlib import Path
from socket import gethostname
from typing import Any, Protocol

from attrs import define, evolve
from numpy.typing import NDArray

from rlhf.config.field_docs import documented
from rlhf.config.sections import ModelConfig
from rlhf.config.source_names import DEMO
from rlhf.data.columns import Columns
from rlhf.data.example import Example
from rlhf.errors import RLHFError
from rlhf.registry.imports import demo_plugin, load_object, load_record
from rlhf.registry.installed import NotInstalled, find


class BadImage(RLHFError):
    """An image that cannot be used, or a row whose placeholders do not match its images. The row is
    dropped and counted with `data.bad_images: drop`."""

    def __init__(self, message: str, files: Mapping[str, str] | None = None) -> None:
        """`files` are those of the row that were read, as `TreeImages.files`."""
        super().__init__(message)
        self.files = dict(files or {})


@documented
class TreeImages(Protocol):
    """The images of one `Row`."""

    files: Mapping[str, str]
    """Digests of the files that were read, by the path in the row: of the content, then after a
    colon what tells whether it has to be read again."""

    lines: Sequence[str]
    """A line about each image, for `rlhf inspect`."""

    thumbnails: Sequence[str]
    """Small pictures of the first images as data URLs, for `rlhf report`."""

    def inputs(self, example: Example) -> dict[str, NDArray[Any]]:
        """Return the keyword arguments of the model for the example that the trainer made of the
        row, as `Example.inputs`."""


@documented
class ImageReader(Protocol):
    """What the record `rlhf.plugin.MediaPlugin` names. It is called in the processes that tokenise,
    once for each row with images."""

    digest: str
    """A digest of what decides what an image becomes, such as the processor of the model."""

    feature: int
    """The token that stands for one feature of an image."""

    def open(self, row: Columns, folder: Path | None) -> Any:
        """Return the `rlhf_rows.RowImages` of a row as it was read; relative paths begin at
        `folder`. With None no file is read, as in the row of a stranger. Raises BadImage."""

    def file_digest(self, path: str, folder: Path, known: str = "") -> str:
        """Return the present digest of a file of `TreeImages.files`, which was `known`."""


@define
class Images:
    """Opens the images of rows, with a reader that is loaded for the first of them."""

    model: ModelConfig
    tokenizer: Any
    folder: Path | None
    """Where relative paths begin; None if no file may be read."""

    @cached_property
    def reader(self) -> ImageReader:
        """The reader. Raises NotInstalled without one."""
        try:
            plugin = find("media", "images")
        except NotInstalled:
            raise NotInstalled(
                "the row has images, which core does not read; run `pip install rlhf-vision`"
            ) from None
        model = self.model
        if model.path.startswith(DEMO):
            model = evolve(model, path=str(demo_plugin(model.path).model_folder()))
        made: ImageReader = load_object(load_record(plugin).reader, plugin)(model, self.tokenizer)
        return made

    def open(self, row: Columns) -> Any:
        """Return the images of a row, which has some."""
        return self.reader.open(row, self.folder)

    def changes(self, digest: str, files: Mapping[str, str], newest: Path) -> dict[str, Any]:
        """Return the present digests of the reader and of the content of files if they are not
        these; else nothing. The file `newest` keeps those of files, which are then not read."""
        folder, digest_of, known = self.folder or Path(), self.reader.file_digest, {**files}
        with suppress(OSError, ValueError):
            known |= json.loads(newest.read_text(encoding="utf-8"))
        now = {path: digest_of(path, folder, known[path]) for path in files}
        if now != known:
            # Other processes may write the same file, and the cache may be read-only.
            part = newest.with_name(f"{newest.name}-{gethostname()}-{getpid()}")
            with suppress(OSError):
                part.write_text(json.dumps(now), encoding="utf-8")
                part.replace(newest)
        was, contents = ({p: d.partition(":")[0] for p, d in it.items()} for it in (files, now))
        same = contents == was and self.reader.digest == digest
        return {} if same else {"reader": self.reader.digest, "files": contents}
