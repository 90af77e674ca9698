"""Helpers for several test modules: states, exact comparisons, faulty drivers, ranks."""
