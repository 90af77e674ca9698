"""Benchmarks that measure a storage's real performance for checkpoints, next to its limit and the
peers."""
