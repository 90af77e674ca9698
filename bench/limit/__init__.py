"""What a storage gives a client that is not ours: the limit that every result is held against.

``of`` finds the limit of a URI; ``client`` says what such a client does, and ``sweep`` finds its
fastest setting; ``raw_file``, ``objects``, ``streams`` and ``fsspec_files`` are the clients;
``alone`` is our own driver without the engine, which is the limit where nothing else speaks to a
storage; ``fio`` is another client of file systems, to compare with.
"""
