"""Is a storage fit for checkpoints? Probes of what Holdfast needs of it, for ``holdfast drivers
--check``.

``findings`` is what is found out, ``ground`` is where it is tried, ``content`` makes objects.
``small``, ``large`` and ``names`` hold the probes, ``course`` runs them all and cleans up.

Scope: seconds and some dozens of requests, through a driver that is taken for right. The
conformance kit (:mod:`holdfast.drivers.conformance`) proves a driver, in minutes. Nothing here
needs pytest; the kit uses ``content`` too.
"""
