"""What users call, step by step: a save, a load, a copy, a verification, a pruning."""
