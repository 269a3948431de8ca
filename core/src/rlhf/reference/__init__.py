"""References, live or cached on disk, and values of other models on disk."""
