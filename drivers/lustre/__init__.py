"""``lustre://``: the local driver, with layouts."""
