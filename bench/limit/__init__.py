"""The limit of a storage, measured with clients other than ours: the baseline of every result.

``of`` finds the limit of a URI: the fastest setting of a client, or, where no other client exists,
our driver without the engine. ``client`` is the interface of clients.
``raw_file``, ``objects``, ``streams`` and ``fsspec_files`` are the clients.
"""
