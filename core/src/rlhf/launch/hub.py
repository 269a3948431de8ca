"""Requests to the hub, with a limit on the wait for an answer."""

from typing import Any

from huggingface_hub import get_session
from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT


def limit_waits() -> None:
    """Give requests of huggingface_hub that would wait for ever, such as those for the description
    of a model, the limit of its downloads."""
    session: Any = get_session()
    hooks = session.event_hooks
    if _limit not in hooks["request"]:
        session.event_hooks = {**hooks, "request": [*hooks["request"], _limit]}


def _limit(request: Any) -> None:
    waits = request.extensions["timeout"]
    request.extensions["timeout"] = {
        name: wait or HF_HUB_DOWNLOAD_TIMEOUT for name, wait in waits.items()
    }
