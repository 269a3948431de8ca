"""The configuration of a run: its sections, and a strict reader of plain data."""

from rlhf.config.sections import Config

__all__ = ["Config"]
