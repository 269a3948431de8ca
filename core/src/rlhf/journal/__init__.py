"""What a run reports while it trains: metrics, progress, speed. Imported by memory, loop, run."""
