"""DeepSpeed's version, from its metadata and compared by number."""

import re
from functools import cache
from importlib import metadata


@cache
def installed_version() -> str:
    """Return the version of DeepSpeed without importing it."""
    return metadata.version("deepspeed")


def older(version: str, than: str) -> bool:
    """Return whether a version is older than another: 0.19.10 is newer than 0.19.9."""
    return _numbers(version) < _numbers(than)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", f"{version}.0.0")[:3])
