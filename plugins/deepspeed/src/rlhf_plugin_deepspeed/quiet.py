"""DeepSpeed's chatter on stdout off, down to its errors, and torch's warnings about what DeepSpeed
calls: imported before deepspeed, whose import already says the first of it. What matters is in the
plan's summary."""

import logging
import warnings

logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
# From 2.13 on torch has other names for collectives that DeepSpeed calls.
warnings.filterwarnings(
    "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
)
