"""``lustre://``: the local driver with file layouts."""
