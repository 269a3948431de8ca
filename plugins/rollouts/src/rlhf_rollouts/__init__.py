"""The engine `embedded`: the model that a run trains writes its answers in the ranks of the run."""

from rlhf.plugin import RolloutPlugin

plugin = RolloutPlugin(engine="rlhf_rollouts.embedded:Embedded")
