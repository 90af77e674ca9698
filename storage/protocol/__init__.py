"""The commit: what makes a checkpoint appear whole or not at all."""
