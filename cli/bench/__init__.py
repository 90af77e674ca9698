"""``holdfast bench``: measure a storage with checkpoints."""
