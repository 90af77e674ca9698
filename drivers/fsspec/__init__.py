"""``fsspec+X://``: storage reached through fsspec's file systems."""
