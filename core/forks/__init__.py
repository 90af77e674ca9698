"""Helpers for forked children, which start with fresh locks, groups of tasks and cached values."""
