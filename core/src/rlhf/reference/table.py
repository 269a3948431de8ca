"""The reference's log-probabilities on disk: found by content, computed once, checked when read.

One folder per (weights, tokens): `reference/WEIGHTS/TOKENS/` under the cache root, in parts of some
thousand examples. A part's name holds the digest of its bytes, so what a killed run has finished is
kept and a torn file is computed again. Plain arrays, no pickles.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.utils.hub import cached_file

from rlhf.config.sections import Config, ModelConfig
from rlhf.data.batch import PackedBatch
from rlhf.data.cache import cache_root
from rlhf.data.examples import Examples
from rlhf.data.layout import layout
from rlhf.data.packing import pack
from rlhf.data.trees import TreeFile
from rlhf.engine import Engine, Mesh
from rlhf.folder.disk import sha256
from rlhf.model.architecture import resolved
from rlhf.readouts import token_logprobs

PART = 2048
"""Examples per file: as much as a kill can lose."""
ROOMIER = 4
"""A pass without gradient takes so many times the tokens of a training micro-batch."""
SILENCE = 60
"""Seconds after which a long computation tells how far it is: it may go on for many minutes before
the run introduces itself, and a short one should not come before the run's first line."""
WEIGHT_FILES = ("config.json", "adapter_config.json", "*.safetensors", "*.bin", "*.py")


class LogprobTable:
    """Of one file of tokenised rows, each answer's log-probabilities, token by token; nan where
    nothing is predicted. An item is a list of float32 arrays, one per answer. With `width` there
    are so many numbers per token."""

    def __init__(self, folder: Path, file: TreeFile, *, width: int | None = None) -> None:
        self.folder = folder / file.digest()
        self.part = max(1, PART // (width or 1))
        """Examples per file."""
        self._shape = () if width is None else (width,)
        self.file = file
        sizes = file.column("length") - file.list_lengths("prompt")
        self._ends = np.cumsum(sizes)
        self._parts: dict[int, NDArray[np.float32]] = {}

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, number: int) -> list[NDArray[np.float32]]:
        part = number // self.part
        first = self._start(part * self.part)
        flat = self._parts[part][self._start(number) - first : self._start(number + 1) - first]
        ends = np.cumsum([len(answer.tokens) for answer in self.file[number].answers])
        return np.split(flat, ends[:-1])

    def open(self) -> list[int]:
        """Map the parts that are whole; the numbers of those that are not. A damaged one is
        removed."""
        missing = []
        for part in range(-(-len(self) // self.part)):
            if part in self._parts:
                continue
            found = (_read(path) for path in sorted(self.folder.glob(f"{part:06d}-*.npy")))
            numbers = self.examples_of(part)
            shape = (self._start(numbers.stop) - self._start(numbers.start), *self._shape)
            whole = [array for array in found if array is not None and array.shape == shape]
            if whole:
                self._parts[part] = whole[0]
            else:
                missing.append(part)
        return missing

    def write(self, part: int, values: NDArray[np.float32]) -> None:
        """Put a part on disk, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        hidden = self.folder / f".{part:06d}.{os.getpid()}.npy"
        np.save(hidden, values, allow_pickle=False)
        hidden.replace(self.folder / f"{part:06d}-{_digest(values)}.npy")

    def examples_of(self, part: int) -> range:
        """The examples in a part."""
        return range(part * self.part, min((part + 1) * self.part, len(self)))

    def _start(self, number: int) -> int:
        return int(self._ends[number - 1]) if number else 0


def own_logprobs(engine: Engine, batch: PackedBatch) -> Tensor:
    """The engine's log-probability of each prediction [N]."""
    return engine(batch, token_logprobs)["logprobs"]


def with_logprobs(
    examples: Sequence[Examples],
    name: str,
    folder: Path,
    mesh: Mesh,
    *,
    engine: Callable[[], Engine],
    tokens: int,
    read: Callable[[Engine, PackedBatch], Tensor],
    width: int | None = None,
) -> tuple[tuple[Examples, ...], str]:
    """Return the examples with the value `name` per token, and what was done in words. Values that
    are missing in `folder` are computed with the engine that `engine` loads. Collective."""
    started = time.monotonic()
    tables = [[LogprobTable(folder, file, width=width) for file in part.files] for part in examples]
    missing = sum(len(table.open()) for part in tables for table in part)
    computed = 0
    if any(mesh.gather(missing)):
        loaded = engine()
        computed = sum(fill(part, loaded, mesh, tokens=tokens, read=read) for part in tables)
    pairs = zip(examples, tables, strict=True)
    complete = tuple(part.with_values(name, found) for part, found in pairs)
    took = time.monotonic() - started
    what = f"{computed:,} examples computed in {took:.1f} s" if computed else "found"
    return complete, f"{what} in {folder}"


def fill(
    tables: Sequence[LogprobTable],
    engine: Engine,
    mesh: Mesh,
    *,
    tokens: int,
    read: Callable[[Engine, PackedBatch], Tensor] = own_logprobs,
) -> int:
    """Compute with `engine` what is not on disk, all ranks together, and open the tables. Returns
    how many examples were computed. Collective.

    `tokens` is the budget of a micro-batch; `read` gives what is stored of each prediction [N] or
    [N, width]; every host writes into its own cache folder.
    """
    started = time.monotonic()
    count = 0
    for table in tables:
        missing = sorted({part for found in mesh.gather(table.open()) for part in found})
        for done, part in enumerate(missing):
            if mesh.rank == 0 and done and time.monotonic() - started > SILENCE:
                print(f"cache      {done} of {len(missing)} parts computed", flush=True)
            values = _computed(table, part, engine, mesh, tokens=tokens, read=read)
            count += len(table.examples_of(part))
            if mesh.local_rank == 0:
                table.write(part, values)
        mesh.barrier()
        left = table.open()
        assert not left, f"parts {left} of {table.folder} are gone"
    return count


def weights_digest(config: Config) -> str:
    """A digest of everything that decides the starting policy's numbers: the content of the model's
    files, its precision, and the versions of the code that computes them."""
    model = config.model
    parts = [str(FORMAT), model.dtype, str(model.quantize)]
    parts += [metadata.version("rlhf-core"), metadata.version("transformers")]
    if model.init == "random":
        parts += ["random", str(config.train.seed), *_contents(_folder(model), WEIGHT_FILES[:1])]
    else:
        parts += _contents(_folder(model), WEIGHT_FILES)
    if model.fp8 is not None:
        parts.append(f"fp8 {model.fp8}")
    if model.adapter is not None:
        parts += _contents(Path(model.adapter), WEIGHT_FILES)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


FORMAT = 1
"""Changes when what is stored does."""


def cache_folder(config: Config, mesh: Mesh) -> Path:
    """Where the log-probabilities of this run's starting policy are. Collective: rank 0 reads the
    files."""
    digest = mesh.gather(weights_digest(config) if mesh.rank == 0 else "")[0]
    return cache_root() / "reference" / digest


def _computed(
    table: LogprobTable,
    part: int,
    engine: Engine,
    mesh: Mesh,
    *,
    tokens: int,
    read: Callable[[Engine, PackedBatch], Tensor],
) -> NDArray[np.float32]:
    """The values of one part, one example after another. Collective."""
    numbers = table.examples_of(part)
    lengths = table.file.column("length")[numbers.start : numbers.stop]
    budget = max(ROOMIER * tokens, int(lengths.max()))
    own: dict[int, NDArray[np.float32]] = {}
    for micro in layout(lengths, mesh.world, budget):
        chosen = [numbers[int(place)] for place in micro[mesh.rank]]
        values = _of_examples(table.file, chosen, engine, read)
        own |= zip(chosen, values, strict=True)
    found = {number: values for share in mesh.gather(own) for number, values in share.items()}
    return np.concatenate([found[number] for number in numbers])


def _of_examples(
    file: TreeFile,
    numbers: Sequence[int],
    engine: Engine,
    read: Callable[[Engine, PackedBatch], Tensor],
) -> Iterator[NDArray[np.float32]]:
    """The values of each example's answers, from one forward. Collective at stage 3."""
    batch = pack(file, numbers)  # type: ignore[arg-type]
    with torch.no_grad():
        found = read(engine, batch.to(engine.device))
    values = torch.full((len(batch.tokens), *found.shape[1:]), torch.nan)
    values[batch.predict_at] = found.cpu()
    start = 0
    for prompt, answers in batch.spans:
        end = start + prompt + sum(answers)
        yield values[start + prompt : end].numpy().copy()
        start = end


def _read(path: Path) -> NDArray[np.float32] | None:
    """The array in a part, mapped into memory; None, and no file any more, where it is damaged."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError):
        path.unlink(missing_ok=True)
        return None
    if array.dtype == np.float32 and path.stem.endswith(_digest(array)):
        return array
    path.unlink(missing_ok=True)
    return None


def _digest(values: NDArray[np.float32]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).data, digest_size=16).hexdigest()


def _folder(model: ModelConfig) -> Path:
    """The local folder of a model that has been loaded."""
    path = cached_file(
        resolved(model.path),
        "config.json",
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )
    return Path(str(path)).parent


def _contents(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Name and SHA-256 of the folder's files of these patterns."""
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda path: f"{path.name} {sha256(path)}", paths))
