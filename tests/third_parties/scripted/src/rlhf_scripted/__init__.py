"""The engine `scripted`: its record."""

from rlhf.plugin import RolloutPlugin

plugin = RolloutPlugin(engine="rlhf_scripted.engine:Scripted")
