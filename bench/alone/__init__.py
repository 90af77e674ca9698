"""Measurements of a driver alone, without checkpoints: ``holdfast bench URI --workload raw``.

``transfer`` is the loop that moves one object. ``plan`` lists the part sizes and concurrencies, and
refuses impossible measurements before any I/O. ``run`` measures.
"""
