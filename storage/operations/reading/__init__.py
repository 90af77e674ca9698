"""Opened checkpoints: tensors, slices and parts, and how two checkpoints differ."""
