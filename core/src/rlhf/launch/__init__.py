"""Ranks are started, joined and signalled."""
