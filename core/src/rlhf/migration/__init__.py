"""A configuration of another project becomes one of ours. The command `migrate` imports it."""
