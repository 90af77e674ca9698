"""Listing, copying, pruning and removing checkpoints."""
