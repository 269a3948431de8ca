"""The engines `embedded`, by which the model that a run trains writes its answers in the ranks of
the run, and `recorded`, which takes them from the files of another run."""

from rlhf.errors import RLHFError
from rlhf.plugin import Config, RolloutPlugin


def check_replaying(config: Config) -> None:
    """Raise RLHFError if `recorded` shall write new answers."""
    if config.rollouts.engine == "recorded":
        raise RLHFError("rollouts.engine recorded is what rollouts.replay uses; remove it")


plugin = RolloutPlugin(engine="rlhf_rollouts.embedded:Embedded", images=True)
replaying = RolloutPlugin(
    engine="rlhf_rollouts.recorded:Recorded", check=check_replaying, images=True
)
