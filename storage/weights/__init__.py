"""Weight channels: trainers publish versions of their weights, and inference follows."""
