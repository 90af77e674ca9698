"""Helpers for forked children: fresh locks, inherited process groups, cached values."""
