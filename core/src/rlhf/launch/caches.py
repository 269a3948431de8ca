"""What a run keeps on disk so that the next one starts sooner."""

import os
import sys
from contextlib import suppress
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from rlhf.errors import RLHFError


def cache_root() -> Path:
    """Return `$RLHF_CACHE`, or `~/.cache/rlhf`. Raises RLHFError if the user has no home."""
    try:
        return Path(os.environ.get("RLHF_CACHE") or "~/.cache/rlhf").expanduser()
    except RuntimeError:
        raise RLHFError("this user has no home folder; set RLHF_CACHE to a folder") from None


def keep_compiled() -> None:
    """Keep in our cache what torch's compiler writes, which is in /tmp by default; and Python's
    bytecode, if packages have none and none would be written.

    An image that was built with uv and PYTHONDONTWRITEBYTECODE has none: the imports of each run
    then take three times as long.
    """
    kernels = cache_root() / "kernels"
    with suppress(OSError):
        kernels.mkdir(parents=True, exist_ok=True)
    if not os.access(kernels, os.W_OK):
        return  # The cache of rows reports it. torch could not be imported with such a folder.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kernels))
    torch = getattr(find_spec("torch"), "origin", "torch/__init__.py")
    bytecode = Path(cache_from_source(torch))
    writable = os.access(bytecode.parents[1], os.W_OK) and not sys.dont_write_bytecode
    if not bytecode.exists() and not writable:
        sys.pycache_prefix, sys.dont_write_bytecode = str(cache_root() / "bytecode"), False
        # For processes that compile kernels.
        os.environ |= {"PYTHONPYCACHEPREFIX": sys.pycache_prefix, "PYTHONDONTWRITEBYTECODE": ""}
