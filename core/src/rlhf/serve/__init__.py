"""Exported reward models behind HTTP. Used by `rlhf serve`; needs `rlhf-core[serve]`."""
