"""The observer `tensorboard`: curves for TensorBoard in the run folder."""

from rlhf.plugin import ObserverPlugin

plugin = ObserverPlugin(hooks="rlhf_observer_tensorboard.observer:TensorBoard")
