"""``sqlite:///folder/file.db/prefix``: objects in one SQLite file."""
