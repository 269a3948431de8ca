"""What a run reports while it trains: metrics, progress, speed."""
