"""The limit of a storage, measured with clients other than ours: the baseline of every result.

``of`` finds the limit of a URI. ``client`` is the interface of such clients, and ``sweep`` finds
the fastest setting of one. ``raw_file``, ``objects``, ``streams`` and ``fsspec_files`` are the
clients. ``alone`` is our driver without the engine: the limit where no other client exists. ``fio``
measures file systems for comparison.
"""
