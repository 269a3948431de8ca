"""What a started server runs in place of vLLM's command."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Serve, or fail as the folder of the environment variable says."""
    Path(os.environ["SEEN"]).write_text("\n".join([str(os.getpid()), *sys.argv[1:]]))
    if "--fail" in sys.argv:
        raise ValueError("the KV cache does not fit")
    print("loading", flush=True)
    from fake_vllm import FakeVLLM  # late: a failure needs no torch

    port = int(sys.argv[sys.argv.index("--port") + 1])
    FakeVLLM(Path(sys.argv[2]), port=port).serve_forever()
