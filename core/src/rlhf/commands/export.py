"""`rlhf export`: write a model folder from a checkpoint."""

from rlhf.api import export


def export_command(source: str, output: str, role: str = "policy") -> int:
    """Write the model of `role` to `output` from a checkpoint, or from the newest one of a run
    folder; returns 0."""
    checkpoint = export(source, output, role=role)
    print(f"exported {checkpoint} to {output}")
    return 0
