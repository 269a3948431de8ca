"""One file per command of `rlhf`; imported by nobody else."""
