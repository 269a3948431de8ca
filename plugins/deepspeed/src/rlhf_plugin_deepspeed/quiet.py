"""DeepSpeed without its log messages. This module imports it first, since the import logs too."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def silenced() -> Iterator[None]:
    """Hide DeepSpeed's log messages below ERROR, and torch's warnings about what DeepSpeed calls;
    the plan's summary has what matters."""
    logger = logging.getLogger("DeepSpeed")
    logger.addFilter(_is_error)
    try:
        with warnings.catch_warnings():
            # torch 2.13 renamed collectives that DeepSpeed calls.
            warnings.filterwarnings(
                "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
            )
            warnings.filterwarnings(
                "ignore", message=r"barrier\(\): using the device under current"
            )
            yield
    finally:
        logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


modules: dict[str, Any] = sys.modules
hidden = {"mlflow"} - {*modules}
# DeepSpeed's autotuner, which no run uses, would import it, half as long as DeepSpeed itself.
modules |= dict.fromkeys(hidden)
try:
    with silenced():
        import deepspeed  # noqa: F401
finally:
    for name in hidden:
        del modules[name]
