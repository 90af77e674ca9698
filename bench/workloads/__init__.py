"""What a benchmark saves: the tensors of each rank of a job, first without a byte, then with.

``spec`` is the interface; ``sized``, ``llama3``, ``mlperf`` and ``index`` implement it;
``llama_dimensions`` has the one description of Llama's shapes, and ``mlperf_rules`` has the rules
of MLPerf Storage. ``materialised`` makes tensors of specs, ``content`` says of which bytes.
"""
