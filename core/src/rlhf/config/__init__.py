"""What a run is asked to do; `rlhf.request.reader` reads it."""

from rlhf.config.sections import Config

__all__ = ["Config"]
