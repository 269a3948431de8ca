"""Starts and signals the ranks of a run, or joins those that a launcher has started; inspects the
machine."""
