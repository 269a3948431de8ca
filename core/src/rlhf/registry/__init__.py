"""Plugins are found, loaded and called."""
