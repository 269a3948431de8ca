"""`python -m rlhf`: the same command for torchrun, srun and the deepspeed launcher."""

import sys

from rlhf.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
