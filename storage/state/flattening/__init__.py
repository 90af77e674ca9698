"""From a nested state to rows of tensors and a tree of values."""
