"""Saves, step by step: the plan of a job, the image of a rank, the commit."""
