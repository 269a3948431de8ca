"""Ranks of a run are started, signalled, or join those that a launcher has started; and what the
machine has for them."""
