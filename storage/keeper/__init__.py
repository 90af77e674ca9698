"""Keepers: a process for each host, outside the trainers, that holds checkpoints in memory."""
