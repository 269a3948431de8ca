"""What core asks of a trainer: calls, checks, names and sums."""
