"""Probes that tell whether a storage is fit for checkpoints, for ``holdfast drivers --check``.

``findings`` defines the results, ``ground`` the scratch folder and test objects, ``probes`` the
probes; ``course`` runs them all and cleans up.

Scope: seconds and a few dozen requests, through a driver that is assumed correct. The conformance
kit (:mod:`holdfast.drivers.conformance`) proves a driver, in minutes. Nothing here needs pytest;
the kit reuses the test objects.
"""
