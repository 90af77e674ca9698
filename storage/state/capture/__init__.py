"""Copies of tensors as they were at the call, while others may write to them."""
