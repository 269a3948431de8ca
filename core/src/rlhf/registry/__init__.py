"""Plugins: found in metadata, loaded when chosen, called through gateways."""
