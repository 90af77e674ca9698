"""The commit protocol: a checkpoint appears completely or not at all."""
