"""The run folder and its checkpoints on disk."""
