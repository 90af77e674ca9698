"""Workloads: the tensors of each rank of a job, first as specs without data, then as tensors.

``spec`` is the interface; ``sized``, ``llama3``, ``mlperf`` and ``index`` implement it.
``llama_dimensions`` is the only description of Llama's shapes, and ``mlperf_rules`` holds the rules
of MLPerf Storage. ``materialised`` makes tensors from specs, and ``content`` describes their bytes.
"""
