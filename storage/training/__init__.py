"""Checkpointing of a training run: when to save, which checkpoints to keep, where to resume."""
