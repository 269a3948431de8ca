"""Models over packed batches: loading, attention over trees, adapters, export."""
