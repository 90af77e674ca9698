"""Ranks together: rounds of agreement, and bytes handed from one to another."""
