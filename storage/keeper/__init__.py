"""Keepers: one process per host, separate from the trainers, that holds checkpoints in memory."""
