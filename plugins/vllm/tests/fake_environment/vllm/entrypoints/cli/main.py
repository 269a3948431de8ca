"""What a started server runs in place of vLLM's command."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Serve, or fail as the arguments say."""
    Path(os.environ["SEEN"]).write_text("\n".join([str(os.getpid()), *sys.argv[1:]]))
    if "--fail" in sys.argv:
        raise ValueError("the KV cache does not fit")
    print("loading", flush=True)
    from fake_vllm import FakeVLLM  # late: a failure needs no torch

    port = int(sys.argv[sys.argv.index("--port") + 1])
    fake = FakeVLLM(Path(sys.argv[2]), port=port)
    if death := next_death():
        path, fake.after[path] = death
        fake.faults[path] = "die"
    fake.serve_forever()


def next_death() -> tuple[str, int] | None:
    """Return the route at which this server dies, and the number of its calls before, from the file
    of the environment variable, which has a line for each server that does not live."""
    file = Path(os.environ.get("DEATHS", os.devnull))
    lines = file.read_text().splitlines()
    if not lines:
        return None
    file.write_text("\n".join(lines[1:]))
    path, calls = lines[0].split()
    return path, int(calls)
