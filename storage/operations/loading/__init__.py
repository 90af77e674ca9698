"""Loads, step by step: whether a checkpoint fits a state, and filling it."""
