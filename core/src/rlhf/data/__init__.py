"""From rows in files to packed batches in the order of a run. Rooms above import its modules;
plugins import `rlhf.trainer`, which re-exports what is public."""
