"""``holdfast bench``: what a storage gives checkpoints."""
