"""The step loop, evaluation, and what they save."""
