"""Object stores: ``s3://``, ``gs://``, ``az://``, and ``http(s)://`` for reading, on obstore.

``driver`` is the contract in terms of obstore; ``upload`` feeds one object to it; ``parts`` cuts
bytes into parts; ``failures`` turns what it raises into our errors; ``runtime`` guards its threads
against forks. ``s3``, ``clouds`` and ``http`` say how each kind of store is reached. ``dangling``
finds and drops unfinished S3 uploads, which obstore cannot.
"""

__all__: list[str] = []
