"""A command line and a YAML file become one checked configuration."""
