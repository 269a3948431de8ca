"""Digests of a model's files: the cache folder of what the model computes is named by their whole
content, and checkpoints have a quick digest of files with frozen weights."""

import hashlib
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers.utils.hub import cached_file

from rlhf.config.sections import Config, ModelConfig
from rlhf.data.cache import short_digest
from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.folder.checkpoints import in_threads
from rlhf.folder.disk import sha256
from rlhf.launch.caches import cache_root
from rlhf.model.architecture import resolved
from rlhf.model.stored import ADAPTER, tensor_bytes, weight_files

FORMAT = 2
"""Changes with the format of what is stored, and with the dtypes of loaded weights."""
WEIGHTS = ("*.safetensors", "*.bin")
WEIGHT_FILES = ("config.json", "adapter_config.json", *WEIGHTS, "*.py")
BLOCK = 4096
"""Bytes of each tensor that a quick digest reads."""
MOST_BLOCKS = 1024
"""Blocks that a quick digest reads of a file without an index of tensors."""


def cache_folder(kind: str, config: Config, mesh: Mesh, *, tokens: int | None) -> Path:
    """Return the folder under the cache root for what the model of `config` computes, of only the
    first `tokens` of its head unless they are None. Collective: rank 0 reads its files."""
    digest = mesh.on_rank_zero(lambda: weights_digest(config))
    return cache_root() / kind / (digest if tokens is None else f"{digest}-first{tokens}")


def weights_digest(config: Config) -> str:
    """Return a digest of everything that decides the model's numbers: the content of its files, its
    precision, and the versions of the code that computes them."""
    model = config.model
    parts = [str(FORMAT), model.dtype, str(model.quantize)]
    parts += [metadata.version("rlhf-core"), metadata.version("transformers")]
    if model.init == "random":
        parts += ["random", str(config.train.seed), *_contents(_folder(model), WEIGHT_FILES[:1])]
    else:
        parts += _contents(_whole_folder(model), WEIGHT_FILES)
    if model.fp8 is not None:
        parts.append(f"fp8 {model.fp8}")
    if model.adapter is not None:
        parts += _contents(_adapter_folder(model.adapter), WEIGHT_FILES)
    return short_digest("\n".join(parts))


def quick_digests(model: ModelConfig, *, adapter: bool) -> dict[str, str]:
    """Return a digest of the weights that were loaded of a model, by its name in the configuration,
    and with `adapter` of those of `model.adapter`. Random weights have none.

    It reads names, sizes and a block in the middle of each tensor: a change of other elements of a
    tensor is missed, if no other tensor changes.
    """
    weights = {} if model.init == "random" else {model.path: weight_files(_folder(model))}
    if adapter and model.adapter is not None:
        weights[model.adapter] = weight_files(_adapter_folder(model.adapter), ADAPTER)
    # A model whose outputs are cached may not have been downloaded.
    found = {name: in_threads(_sampled, files) for name, files in weights.items() if files}
    return {name: short_digest("\n".join(parts)) for name, parts in found.items()}


def _folder(model: ModelConfig) -> Path:
    """Return the local folder of a model that has been loaded."""
    path = cached_file(
        resolved(model.path),
        "config.json",
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )
    return Path(str(path)).parent


def _whole_folder(model: ModelConfig) -> Path:
    """Return the local folder of a model with its weights, which are downloaded if it has not been
    loaded: one whose outputs are cached never is. Raises RLHFError without weights."""
    folder = _folder(model)
    for pattern in WEIGHTS:
        if not _files(folder, WEIGHTS) and not Path(resolved(model.path)).is_dir():
            snapshot_download(
                model.path, revision=model.revision, allow_patterns=pattern, ignore_patterns="*/*"
            )
    if not _files(folder, WEIGHTS):
        raise RLHFError(f"{model.path} has no weights here; download them, or check the name")
    return folder


def _adapter_folder(adapter: str) -> Path:
    """Return the local folder of an adapter that has been loaded."""
    return Path(str(cached_file(adapter, "adapter_config.json"))).parent


def _files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def _contents(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Return name and SHA-256 of the folder's files of these patterns."""
    return in_threads(lambda path: f"{path.name} {sha256(path)}", _files(folder, patterns))


def _sampled(path: Path) -> str:
    """Return a file's name, its size and a digest of some of its blocks."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        # Blocks that are evenly spaced cover a small file.
        starts: Iterable[int] = range(0, size, max(BLOCK, size // MOST_BLOCKS))
        if path.suffix == ".safetensors":  # One in the middle of each tensor.
            starts = (max(first, (first + end - BLOCK) // 2) for first, end in tensor_bytes(file))
        for start in starts:
            file.seek(start)
            digest.update(file.read(BLOCK))
    return f"{path.name} {size} {digest.hexdigest()}"
