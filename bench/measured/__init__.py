"""``holdfast bench URI``: measures checkpoints on a storage, next to what its driver alone reaches.

``plan`` describes a measurement, and refuses an impossible one before any I/O. ``run`` measures.
``beside`` adds the limit and the peers. ``result`` holds the results and their JSON. ``validity``
judges whether they are valid, and ``comparison`` compares two of them.
"""
