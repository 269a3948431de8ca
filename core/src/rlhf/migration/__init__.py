"""Converts a configuration of another project into one of ours, for `rlhf migrate`."""
