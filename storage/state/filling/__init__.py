"""Filling tensors and objects of a state with loaded values."""
