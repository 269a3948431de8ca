"""What runs the blocks of the documentation."""

import io
import os
import re
import sys
from contextlib import redirect_stderr

from rlhf.commands.main import main

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""A block: its language and its text."""


def commands(block: str) -> list[str]:
    """Return the commands of a shell block."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in (each.split("#")[0].strip() for each in lines) if line]


def in_place(words: list[str], folder: str, cache: str) -> tuple[int, str]:
    """`rlhf WORDS` in that folder, in a rank of the pool: exit code and complaint."""
    os.chdir(folder)
    if sys.path[0] != folder:  # What is installed is looked up again when sys.path changes.
        sys.path.insert(0, folder)
    os.environ |= {"RLHF_CACHE": cache, "TRACKIO_DIR": f"{folder}/trackio", "WANDB_MODE": "offline"}
    with redirect_stderr(io.StringIO()) as errors:
        code = main(words)
    return code, "" if code == 0 else errors.getvalue()
