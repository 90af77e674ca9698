"""``file://``: files on this host, and on mounts that behave like local files."""
