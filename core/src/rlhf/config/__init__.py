"""The configuration of a run: its sections, and a strict reader of plain data."""
