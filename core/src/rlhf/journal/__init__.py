"""What a run tells: metrics, progress, speed."""
