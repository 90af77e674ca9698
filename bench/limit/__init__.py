"""The limit of a storage, measured with clients other than ours: the baseline of every result.

``of`` finds the limit of a URI; where no other client exists, it is our driver without the engine.
``client`` is the interface of clients, and ``sweep`` finds the fastest setting of one.
``raw_file``, ``objects``, ``streams`` and ``fsspec_files`` are the clients.
"""
