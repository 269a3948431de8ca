"""Run `vllm serve` until its parent, the run, has ended: rlhf_vllm_serve.py PARENT ARGUMENT...

PARENT is the id of the parent's process; 0 is that of whichever process has started this one.
"""

import os
import signal
import sys
import threading
import time

GRACE = 10.0
"""Seconds in which this process has to end after SIGTERM."""


def end_with(parent: int) -> None:
    """End this process and those that it has started when its parent has died."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)  # It ends the others, and its shared memory is removed.
    time.sleep(GRACE)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    if os.getpgrp() != os.getpid():
        os.setsid()  # The end of this server is not that of the script that has started it.
    threading.Thread(target=end_with, args=[int(sys.argv[1]) or os.getppid()], daemon=True).start()
    from vllm.entrypoints.cli.main import main  # late: its import takes long

    sys.argv = ["vllm", "serve", *sys.argv[2:]]
    main()
