"""Object stores on obstore: ``s3://``, ``gs://``, ``az://``, and read-only ``http(s)://``.

``driver`` implements the contract on obstore. ``uploads`` splits an object into parts and sends it,
``errors`` translates errors, and ``runtime`` guards obstore's threads against forks.
``s3``, ``gs``, ``az`` and ``http`` configure the kinds of stores. ``s3_unfinished`` finds and drops
unfinished S3 uploads, which obstore cannot do.
"""
