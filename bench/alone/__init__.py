"""Measurements of a driver alone, without checkpoints: ``holdfast bench URI --workload raw`` and
``meta``.

``transfer`` is the loop that moves one object. ``grid`` lists the part sizes and concurrencies.
``plan`` refuses impossible measurements before any I/O. ``raw`` and ``meta`` measure. ``result``
holds the results and their JSON.
"""
