"""Workloads: the tensors of each rank of a job, first as specs without data, then as tensors.

``spec`` is the interface; ``sized``, ``llama3``, ``mlperf`` and ``index`` make workloads.
``llama_dimensions`` is the only description of Llama's shapes. ``materialised`` makes tensors.
"""
