"""Converts a command line and YAML files into one checked configuration."""
