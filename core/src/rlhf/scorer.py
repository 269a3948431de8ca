"""What the module of a scorer imports, the base class of what scores answers with an exported
model, and what a server of scorers imports."""

import abc
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from attrs import evolve
from torch import Tensor

from rlhf.config.sections import ModelConfig
from rlhf.data.arrays import blank_arrays
from rlhf.data.batch import PackedBatch
from rlhf.data.example import Example
from rlhf.data.files import parse_object
from rlhf.data.images import Images
from rlhf.data.order import rounding_on
from rlhf.data.packing import pack
from rlhf.data.rows import Row
from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.model.architecture import DTYPES
from rlhf.model.exported import exported_model, exported_tokenizer
from rlhf.model.extra import exported_extra
from rlhf.model.head import Head
from rlhf.model.packed import BareEngine, PackedModel
from rlhf.model.probe import AttentionPath, choose_path
from rlhf.model.save import SCORED_BY
from rlhf.model.stored import damaged_file
from rlhf.model.task import reads_images
from rlhf.registry.imports import load_object, load_record
from rlhf.registry.installed import find

__all__ = ["Scorer", "open_scorer", "parse_object", "parts_of"]

MAX_TOKENS = 8192
"""Tokens of a forward pass by default."""
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQAAAACCEkxzAAAA"
    "D0lEQVR42mNgGAWjgHwAAAJAAAHgTR1EAAAAAElFTkSuQmCC"
)
"""A black image."""


class Scorer(abc.ABC):
    """The model in the model folder or adapter folder of a run, as a function from answers to
    scores.

    A trainer that names its scorer in `Trainer.scorer` can be served by `rlhf serve`, which creates
    it as `Scorer(folder, device=device, dtype=dtype)`. Subclasses implement `encode` and `scores`.
    Each answer is computed by itself with the model's own attention, as in plain transformers,
    until `pack` is called.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        task: Literal["causal", "sequence", "token"],
        tokens: Sequence[int] | None = None,
        device: str = "cpu",
        dtype: Any = "auto",
    ) -> None:
        """`tokens` are those whose logits are read of a language model. `dtype` is `fp32`, `bf16`,
        `fp16`, a torch.dtype, or `auto` for that of the folder. Raises RLHFError for a folder that
        does not load or holds a model of another task."""
        self.folder, self.task = Path(folder), task
        self._tokens = tokens
        model = exported_model(self.folder, task, dtype=dtype)
        self.tokenizer = exported_tokenizer(folder)
        self.images = Images(ModelConfig(path=str(folder)), self.tokenizer, None)
        """Opens the images in messages: data URLs, bytes and images of Pillow, for `encode`."""
        self.config = model.config
        self.device = torch.device(device)
        self.extra = exported_extra(self.folder)
        """The trainer's own parameters, on the host."""
        self.precision = next(name for name, kind in DTYPES.items() if kind == model.dtype)
        self.module = PackedModel(model.to(device).eval(), path="separate")

    @abc.abstractmethod
    def encode(self, prompt: Any, answers: Sequence[Any]) -> Row:
        """Return a prompt and its answers as token ids, with `columns["ends"]`: for each answer the
        indices of its tokens at which a score is read. Raises RLHFError for values of another
        shape. Never called by two threads at once."""

    @abc.abstractmethod
    def scores(self, logits: Tensor) -> list[float]:
        """Return the scores of an answer from the logits [N, L] at its N ends, in float32 on the
        host. `self.extra` has the trainer's own parameters."""

    def pack(self, *, longest: int = MAX_TOKENS) -> AttentionPath:
        """Compute many answers in one row from now on, and a prompt once for all its answers if the
        model can; return how. `longest` is the number of tokens of the longest prompt with an
        answer."""
        engine = BareEngine(module=self.module, device=self.device, precision=self.precision)
        return choose_path(engine, Mesh(), longest=longest, image=self._pictured())

    def _pictured(self) -> Example | None:
        """Return a question about an image, if this installation and the model answer any."""
        if self.task != "sequence" or not reads_images(self.config):
            return None
        question = {"role": "user", "content": [{"type": "image", "image": PICTURE}]}
        try:
            row = self.encode([question], [[{"role": "assistant", "content": "a"}]])
        except RLHFError:  # Without a reader of images, requests with images are refused.
            return None
        return examples_of([row])[0]

    def read(
        self, prompt: Any, answers: Sequence[Any], *, max_tokens: int = MAX_TOKENS
    ) -> list[Tensor]:
        """Return the logits [N, L] of each of the answers, in forward passes of at most
        `max_tokens` tokens or one answer."""
        parts = parts_of(self.encode(prompt, answers), max_tokens)
        return [logits for part in parts for logits in self.logits([part])[0]]

    @torch.no_grad()
    def logits(self, rows: Sequence[Row]) -> list[list[Tensor]]:
        """Return the logits [N, L] of each answer of each of the rows, in one forward pass."""
        batch = pack(examples_of(rows), range(len(rows)), round_to=rounding_on(self.device))
        ends = [torch.tensor(own) for row in rows for own in row.columns["ends"]]
        lengths = [length for _, answers in batch.spans for length in answers]
        starts = (batch.answer_end + 1 - torch.tensor(lengths)).tolist()
        places = torch.cat([start + own for start, own in zip(starts, ends, strict=True)])
        readout = partial(self._readout, places=places.to(self.device))
        logits = self.module(batch.to(self.device), readout)["logits"].cpu()
        by_answer = iter(logits.split([len(own) for own in ends]))
        return [[next(by_answer) for _ in row.answers] for row in rows]

    def _readout(
        self, hidden: Tensor, head: Head, batch: PackedBatch, *, places: Tensor
    ) -> dict[str, Tensor]:
        """Read the logits [P, L] at the indices `places` [P] of the row, in float32."""
        if self._tokens is not None:
            head = head.rows(torch.tensor(self._tokens, device=hidden.device))
        return {"logits": head.in_float32().logits(hidden.index_select(0, places).float())}


def examples_of(rows: Sequence[Row]) -> list[Example]:
    """Return the trees of rows with the inputs of their images; if any has some, those of text for
    the others."""
    examples = [Example(row.prompt, row.answers) for row in rows]
    pairs = zip(rows, examples, strict=True)
    found = [row.images.inputs(example) if row.images else {} for row, example in pairs]
    known: Mapping[str, Any] = next(filter(None, found), {})
    arrays = [(name, array.dtype.str, array.shape) for name, array in known.items()]
    return [
        evolve(example, inputs=inputs or blank_arrays(arrays, example))
        for example, inputs in zip(examples, found, strict=True)
    ]


def parts_of(row: Row, max_tokens: int) -> Iterator[Row]:
    """Yield the row in parts of at most `max_tokens` tokens or one answer, each with the prompt."""
    first, size = 0, len(row.prompt)
    for number, answer in enumerate(row.answers):
        if number > first and size + len(answer.tokens) > max_tokens:
            yield _part(row, slice(first, number))
            first, size = number, len(row.prompt)
        size += len(answer.tokens)
    yield _part(row, slice(first, None))


def _part(row: Row, answers: slice) -> Row:
    columns = {**row.columns, "ends": row.columns["ends"][answers]}
    return evolve(row, answers=row.answers[answers], columns=columns)


def open_scorer(folder: Path, *, device: str, dtype: Any) -> Scorer:
    """Return the scorer of a run's `model/` folder. Raises RLHFError for any other folder."""
    try:
        name = json.loads((folder / "config.json").read_text(encoding="utf-8"))[SCORED_BY]
        if not isinstance(name, str):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError):
        raise damaged_file(folder, ["config.json"]) or RLHFError(
            f"{folder} has no config.json that names a trainer with a scorer; pass the model/ "
            "folder of a run of rm or prm, or of another trainer with a scorer"
        ) from None
    plugin = find("trainer", name)
    trainer = load_object(load_record(plugin).trainer, plugin)
    if trainer.scorer is None:
        raise RLHFError(f"{plugin} has no scorer, so {folder} cannot be served")
    scorer: Scorer = trainer.scorer(folder, device=device, dtype=dtype)
    return scorer
