"""What every room may use: it imports nothing of Holdfast."""
