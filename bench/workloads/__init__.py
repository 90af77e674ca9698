"""Workloads: the tensors of each rank of a job, first as specs without data, then as tensors.

``spec`` is the interface; ``sized``, ``llama3``, ``mlperf`` and ``index`` make workloads.
``materialised`` makes tensors.
"""
