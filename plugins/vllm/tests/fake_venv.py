"""A virtual environment with what looks like vLLM."""

import venv
from collections.abc import Iterable
from pathlib import Path

PARTS = ("vllm", "torch", "safetensors")


def make_environment(
    folder: Path, *, version: str | None = "0.32.1", packages: Iterable[str] = PARTS
) -> str:
    """Make an environment with empty packages and the metadata of a vLLM; return its Python, which
    is a link to that of the tests."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for package in packages:
        (site / package).mkdir()
    if version is not None:
        metadata = site / f"vllm-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    python = folder / "bin" / "python"
    assert python.is_symlink()
    return str(python)
