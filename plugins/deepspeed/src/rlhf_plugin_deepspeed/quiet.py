"""Silence DeepSpeed's log messages below ERROR, and torch's warnings about functions that DeepSpeed
calls. Imported before deepspeed, whose import already logs; the plan's summary has what matters."""

import logging
import warnings

logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
# torch 2.13 renamed collectives that DeepSpeed calls.
warnings.filterwarnings(
    "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
)
