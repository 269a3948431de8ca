"""The cache folder of what a model computes, named by the content of its weights."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from transformers.utils.hub import cached_file

from rlhf.config.sections import Config, ModelConfig
from rlhf.engine import Mesh
from rlhf.folder.disk import sha256
from rlhf.launch.caches import cache_root
from rlhf.model.architecture import resolved

FORMAT = 1
"""Changes with the format of what is stored."""
WEIGHT_FILES = ("config.json", "adapter_config.json", "*.safetensors", "*.bin", "*.py")


def cache_folder(kind: str, config: Config, mesh: Mesh) -> Path:
    """Return the folder under the cache root for what the model of `config` computes. Collective:
    rank 0 reads its files."""
    return cache_root() / kind / mesh.on_rank_zero(lambda: weights_digest(config))


def weights_digest(config: Config) -> str:
    """Return a digest of everything that decides the model's numbers: the content of its files, its
    precision, and the versions of the code that computes them."""
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
        settings = Path(str(cached_file(model.adapter, "adapter_config.json")))
        parts += _contents(settings.parent, WEIGHT_FILES)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _folder(model: ModelConfig) -> Path:
    """Return the local folder of a model that has been loaded."""
    path = cached_file(
        resolved(model.path),
        "config.json",
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )
    return Path(str(path)).parent


def _contents(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Return name and SHA-256 of the folder's files of these patterns."""
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda path: f"{path.name} {sha256(path)}", paths))
