"""Other libraries that look into checkpoints: each module serves one, and is imported by it, or by
name."""
