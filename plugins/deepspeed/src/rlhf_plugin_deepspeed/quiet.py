"""DeepSpeed's chatter on stdout off, down to its errors: imported before deepspeed, whose import
already says the first of it. What matters is in the plan's summary."""

import logging

logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
