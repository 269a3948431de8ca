"""What a run folder shows about its run: the report's page and the model card. Imported by commands
and loop."""
