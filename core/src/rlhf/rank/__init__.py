"""One rank from its configuration to the exported model."""
