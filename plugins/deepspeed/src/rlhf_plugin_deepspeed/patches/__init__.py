"""Everything that the backend replaces in DeepSpeed: `table` lists it, `install` does it."""
