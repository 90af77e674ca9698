"""Whom this library is compared with: every peer once, for all benchmarks.

``peer`` is what a peer is; ``on_files`` and ``through_dcp`` are the peers, each as its
documentation says it is used; ``choice`` says which of them are installed and can do a storage.
"""
