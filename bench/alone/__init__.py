"""A driver alone, without checkpoints: ``holdfast bench URI --workload raw`` and ``meta``.

``transfer`` is the loop that moves one object; ``grid`` says at which part sizes and concurrencies;
``plan`` refuses before any I/O what cannot be measured; ``raw`` and ``meta`` measure; ``result`` is
what they find, as JSON.
"""
