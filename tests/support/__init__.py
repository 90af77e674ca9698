"""What several test modules need: states to save, comparisons to the bit, drivers that misbehave,
ranks."""
