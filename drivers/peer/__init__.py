"""``peer://``: read-only access over HTTP to the memory of keepers on other hosts."""
