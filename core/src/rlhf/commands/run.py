"""`rlhf run`: train."""

from typing import TYPE_CHECKING

from rlhf.launch.signals import STOPPED
from rlhf.plugin import CommandPlugin

if TYPE_CHECKING:  # Start-up time.
    from rlhf.request.reader import Request

plugin = CommandPlugin(
    help="train: rlhf run sft --model Qwen/Qwen3-0.6B --data chats.jsonl",
    run="rlhf.commands.run:run_command",
    takes="run",
)


def run_command(request: "Request") -> int:
    """Train; returns the exit code 0, or 143 if a signal stopped the run."""
    from rlhf.api import start  # late: start-up time

    _, ended = start(request)
    return STOPPED if ended == "signal" else 0
