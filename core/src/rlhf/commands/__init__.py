"""The commands of `rlhf`, one file each; no other room imports them."""
