"""From rows in files to packed batches in the order of a run. Plugins import `rlhf.trainer`, which
re-exports what is public."""
