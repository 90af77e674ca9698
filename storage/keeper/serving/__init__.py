"""A keeper's memory, served to other hosts over HTTP."""
