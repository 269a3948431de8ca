"""What several tests of a kit share: made once, and a failure is reported once."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from attrs import define, field

from rlhf.errors import first_line
from rlhf_devkit.ranks import RankFailure

Made = TypeVar("Made")


@define
class Once:
    """Runs and inputs by name. The test that needs one first makes it; if that fails, it fails with
    the error, and every later test names the cause without making it again."""

    _made: dict[str, Any] = field(factory=dict, init=False)
    _failed: dict[str, str] = field(factory=dict, init=False)

    def has(self, name: str) -> bool:
        """Return whether this name has been made, or has failed."""
        return name in self._made or name in self._failed

    def get(self, name: str, make: Callable[[], Made]) -> Made:
        """Return what `make` returned for this name."""
        if name in self._failed:
            pytest.fail(f"{name} failed {self._failed[name]}", pytrace=False)
        if name not in self._made:
            try:
                self._made[name] = make()
            except Exception as error:
                self._failed[name] = f"in {current_test()}: {cause_of(error)}"
                raise
        made: Made = self._made[name]
        return made


def cause_of(error: Exception) -> str:
    """Return the type and the first line of an error, or those of the rank that raised it."""
    if isinstance(error, RankFailure) and error.cause:
        return error.cause
    return f"{type(error).__name__}: {first_line(error)}"


def current_test() -> str:
    """Return the name of the test that runs."""
    running = os.environ.get("PYTEST_CURRENT_TEST", "an earlier test")
    return running.rpartition("::")[2].rpartition(" (")[0] or running
