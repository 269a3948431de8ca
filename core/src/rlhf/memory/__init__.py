"""What a step takes of a device, and what is chosen from it."""
