"""Models over packed batches: loading, attention over trees, adapters, export.

Imported by the rooms above it: readouts, reference, loop, memory, run and commands.
"""
