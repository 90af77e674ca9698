"""``file://``: files of this host, and of mounts that look like them."""
