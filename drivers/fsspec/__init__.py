"""``fsspec+X://``: the file systems of fsspec as storages."""
