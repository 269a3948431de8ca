"""The observer `trackio`. This module has its record and settings, and does not import trackio."""

from attrs import frozen

from rlhf.plugin import ObserverPlugin


@frozen(kw_only=True)
class TrackioConfig:
    """Trackio. It reads a token for a Space from HF_TOKEN, or from where `hf auth login` put it."""

    project: str = "rlhf"
    """Project in which the run appears; `trackio show --project rlhf` opens it."""
    space: str | None = None
    """Space of the hub with the dashboard, as in OWNER/NAME. Default: TRACKIO_SPACE_ID, else the
    folder TRACKIO_DIR of this machine."""
    group: str | None = None
    """Group of runs that are shown together."""


plugin = ObserverPlugin(config=TrackioConfig, hooks="rlhf_observer_trackio.observer:Trackio")
