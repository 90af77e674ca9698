"""The engine: capture, schedule, commit, load."""
