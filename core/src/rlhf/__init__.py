"""Pluggable post-training: a small core, a backend plugin, one plugin per workflow."""
