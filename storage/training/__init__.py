"""What leads a training run: when to save, what to keep, where to go on from."""
