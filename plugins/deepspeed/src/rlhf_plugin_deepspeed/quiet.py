"""Silence DeepSpeed's log messages below ERROR, and torch's warnings about functions that DeepSpeed
calls. Imported before deepspeed, whose import already logs; the plan's summary has what matters."""

import logging
import sys
import warnings
from typing import Any

logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
# torch 2.13 renamed collectives that DeepSpeed calls.
warnings.filterwarnings(
    "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
)

modules: dict[str, Any] = sys.modules
if "mlflow" not in modules:
    # DeepSpeed's autotuner, which no run uses, would import it, half as long as DeepSpeed itself.
    modules["mlflow"] = None
    try:
        import deepspeed  # noqa: F401
    finally:
        del modules["mlflow"]
