"""The observer `mlflow`. This module has its record and settings, and does not import mlflow."""

from urllib.parse import urlsplit

from attrs import field, frozen

from rlhf.plugin import ObserverPlugin


def _without_password(instance: object, attribute: object, value: str | None) -> None:
    if urlsplit(value or "").password is not None:
        raise ValueError(
            "contains a password, which the run folder would record; set MLFLOW_TRACKING_PASSWORD, "
            "or the whole address as MLFLOW_TRACKING_URI"
        )


@frozen(kw_only=True)
class MlflowConfig:
    """MLflow tracking. It reads credentials from the variables MLFLOW_TRACKING_..."""

    experiment: str = "rlhf"
    """Experiment in which the run appears; it is created if it does not exist."""
    uri: str | None = field(default=None, validator=_without_password)
    """Address of the server or store. Default: MLFLOW_TRACKING_URI, else mlflow.db in this
    folder."""


plugin = ObserverPlugin(config=MlflowConfig, hooks="rlhf_observer_mlflow.observer:Mlflow")
