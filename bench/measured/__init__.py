"""``holdfast bench URI``: measures checkpoints on a storage, next to what its driver alone reaches.

``plan`` describes a measurement, and refuses an impossible one before any I/O. ``course`` runs
contestants on all ranks; ``ranks`` joins and ``launch`` starts them. ``run`` measures checkpoints,
and ``beside`` adds the limit and the peers. ``result`` holds results: their JSON, their validity,
and comparisons.
"""
