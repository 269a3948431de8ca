"""`rlhf run`: start the ranks of a run on this machine, or join those that a launcher started."""

import os
import sys
from pathlib import Path

from rlhf.errors import RLHFError
from rlhf.folder import run_folder
from rlhf.launch.hosts import Place, check_world, place_of_host
from rlhf.launch.local import Ranks, die_with_parent, num_devices
from rlhf.launch.signals import PARENT
from rlhf.launch.slurm import join_slurm
from rlhf.request.reader import Request


def run_command(request: Request) -> int:
    """Train; returns the exit code 0, 2 or 143."""
    join_slurm()
    check_world(request.nproc)
    if "RANK" in os.environ:
        ours = PARENT in os.environ
        if request.nproc is not None and not ours:
            raise RLHFError(
                f"--nproc {request.nproc} has no effect under a launcher, which starts the ranks; "
                "remove it"
            )
        die_with_parent()
        from rlhf.rank.run import run_rank

        # Else rank 0 verifies where it can tell the ranks of all launchers.
        one_launcher = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        return run_rank(request, verified=ours and one_launcher)
    place = place_of_host()
    if place.hosts == 1:
        folder = run_folder.choose(request)
        run_folder.check_resumable(request, folder)
    elif request.config.output is None:
        raise RLHFError("a run on several hosts needs --output, the same folder on all of them")
    else:
        folder = Path(request.config.output)
    ranks = num_ranks(request, place)
    from rlhf.rank.dataset import prepare_data
    from rlhf.rank.run import run_rank

    if ranks * place.hosts == 1:
        return run_rank(request, verified=True)
    prepare_data(request)
    command = [sys.executable, "-m", "rlhf", *request.argv]
    checkpoint = request.config.checkpoint
    return Ranks(
        command, ranks, checkpoint.stop_timeout,
        place=place, signals=checkpoint.stop_signals, places_in=folder / run_folder.RANKS,
    ).wait()  # fmt: skip


def num_ranks(request: Request, place: Place) -> int:
    """Return the number of ranks that are started on this host."""
    return request.nproc or place.nproc or (1 if request.demo else num_devices())
