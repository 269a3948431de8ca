"""`rlhf run`: train."""

from rlhf.api import start
from rlhf.launch.signals import STOPPED
from rlhf.request.reader import Request


def run_command(request: Request) -> int:
    """Train; returns the exit code 0, or 143 if a signal stopped the run."""
    _, ended = start(request)
    return STOPPED if ended == "signal" else 0
