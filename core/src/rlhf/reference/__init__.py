"""References and teachers, live or cached on disk."""
