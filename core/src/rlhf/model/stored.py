"""The files of a model or adapter folder: which of them have its weights, what tensors these hold,
and which files are damaged."""

import json
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import get_safetensors_metadata, try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from rlhf.errors import RLHFError

MODEL = ("model.safetensors", "pytorch_model.bin")
ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")
"""Weights of a model and of an adapter, in the order in which they are looked for."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.*")
"""All files of an adapter that are read to load it."""
WEIGHTS = ("*.safetensors", "*.index.json", "*.bin")
TOKENIZER = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model", "*.txt")
TEMPLATES = ("*.jinja", "additional_chat_templates/*.jinja", "merges.txt")
"""Files of a tokenizer that transformers reads as text, so that a damaged one raises no error."""
POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of the text that git has in place of a large file."""
LARGEST_HEADER = 100_000_000
"""Bytes that safetensors accepts as the header of a file."""


class StoredWeights(Mapping[str, Tensor]):
    """The tensors in files of weights by name. Names come from the headers of the files; a tensor
    is mapped into memory when it is asked for."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.files: dict[str, Path] = {}
        """The file of each tensor."""
        self._opened = {file: _opened(file) for file in files}
        for file, opened in self._opened.items():
            self.files.update(dict.fromkeys(opened.keys(), file))

    def __getitem__(self, name: str) -> Tensor:
        opened = self._opened[self.files[name]]
        value: Tensor = opened[name] if isinstance(opened, dict) else opened.get_tensor(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


class PublishedWeights(Mapping[str, Tensor]):
    """The tensors of a model on the hub by name. Only the headers of its files are downloaded, and
    the file of a tensor that is asked for."""

    def __init__(self, name: str, revision: str | None) -> None:
        self._name, self._revision = name, revision
        self._files = get_safetensors_metadata(name, revision=revision).weight_map

    def __getitem__(self, name: str) -> Tensor:
        file = cached_file(self._name, self._files[name], revision=self._revision)
        return StoredWeights([Path(str(file))])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def stored_weights(path: str, revision: str | None) -> Mapping[str, Tensor]:
    """Return the tensors of a model folder or a model on the hub by name; none if they cannot be
    known before the model is loaded."""
    with suppress(Exception):  # Loading the model will say what is wrong.
        files = model_files(path, revision)
        is_here = files or Path(path).is_dir()
        return StoredWeights(files) if is_here else PublishedWeights(path, revision)
    return {}


def model_files(path: str, revision: str | None) -> list[Path]:
    """Return the files with the weights of a model folder, or of a model on the hub that has been
    downloaded; none if its index is damaged."""
    folder = model_folder(path, revision)
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        return [] if folder is None else weight_files(folder)
    return []


def model_folder(path: str, revision: str | None) -> Path | None:
    """Return a model folder, or that of a model on the hub if some of it has been downloaded."""
    if Path(path).is_dir():
        return Path(path)
    with suppress(ValueError):  # Not a name that the hub allows.
        config = try_to_load_from_cache(path, "config.json", revision=revision)
        return Path(config).parent if isinstance(config, str) else None
    return None


def _opened(file: Path) -> Any:
    """Return an open safetensors file, or the tensors of one of torch's by name."""
    if file.suffix == ".safetensors":
        return safe_open(file, "pt")
    # Files of torch before 1.6 cannot be mapped, and would be read twice.
    is_mapped = zipfile.is_zipfile(file)
    return torch.load(file, mmap=True, weights_only=True) if is_mapped else {}


def weight_files(folder: Path, names: Sequence[str] = MODEL) -> list[Path]:
    """Return the files that transformers and peft load: the first of these names or its shards."""
    for path in (folder / name for name in names):
        index = path.with_name(f"{path.name}.index.json")
        if path.is_file():
            return [path]
        if index.is_file():
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return sorted({folder / shard for shard in shards})
    return []


def damaged_file(folder: Path | str, patterns: Sequence[str]) -> RLHFError | None:
    """Return the error for the first damaged file of these names in a local folder; None if there
    is none."""
    for pattern in patterns:
        for file in sorted(Path(folder).glob(pattern)):
            if file.is_file() and (problem := damage(file)):
                return RLHFError(f"{file} {problem}")
    return None


def damage(file: Path) -> str:
    """Return what is wrong with a file and what to do, in words; "" if nothing can be seen."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        if opened.read(len(POINTER)) == POINTER:
            return f"is a git-lfs pointer, not the file itself; run git lfs pull in {file.parent}"
        if not size:
            return "is empty; download it again"
        opened.seek(0)
        problem = _problem(opened, file.suffix, size)
    return problem and f"{problem}; download it again"


def _problem(file: BinaryIO, suffix: str, size: int) -> str:
    """Return what is wrong with the content of a file of `size` bytes, or ""."""
    if suffix == ".safetensors":
        try:
            whole = max((end for _, end in tensor_bytes(file)), default=size)
        except (struct.error, ValueError, LookupError, TypeError, AttributeError):
            return "is truncated, or not a safetensors file"
        return f"is truncated: it has {size:,} of {whole:,} bytes" if size < whole else ""
    if suffix == ".json":
        try:
            json.load(file)
        except ValueError:
            return "is truncated, or not a JSON file"
    # A file of torch is a zip file, whose index is at its end.
    if suffix == ".bin" and file.read(2) == b"PK" and not zipfile.is_zipfile(file):
        return "is truncated"
    return ""


def tensor_bytes(file: BinaryIO) -> list[tuple[int, int]]:
    """Return first byte and end of each tensor of a safetensors file, in order. The format: docs of
    safetensors, "Format"."""
    (length,) = struct.unpack("<Q", file.read(8))
    tensors = json.loads(file.read(min(length, LARGEST_HEADER)))
    tensors.pop("__metadata__", None)
    begin = 8 + length
    offsets = sorted(tensor["data_offsets"] for tensor in tensors.values())
    return [(begin + first, begin + end) for first, end in offsets]
