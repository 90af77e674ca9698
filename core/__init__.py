"""Helpers for all rooms. Imports nothing of Holdfast."""
