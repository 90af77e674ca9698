"""The libraries that all benchmarks compare this one with.

``peer`` defines a peer. ``on_files`` and ``through_dcp`` hold the peers, each used as its
documentation says. ``choice`` selects those that are installed and support a storage.
"""
