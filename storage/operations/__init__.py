"""The operations behind the public API, step by step: save, load, copy, verify, prune."""
