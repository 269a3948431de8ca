"""One rank from its configuration to the exported model; `loop.py` is the training loop."""
