"""The step loop, evaluation, and what they save. Imported by run and commands."""
