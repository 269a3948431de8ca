"""The engine `recorded`: its record."""

from rlhf.plugin import RolloutPlugin

plugin = RolloutPlugin(engine="rlhf_recorded.engine:Recorded")
