"""Conformance kit for drivers: tests the contract of :mod:`holdfast.drivers.contract` with pytest.

    pip install pytest hypothesis
    pytest -v --pyargs holdfast.drivers.conformance --driver-uri memory://anything
    pytest -v --pyargs holdfast.drivers.conformance \\
        --driver-uri 's3://bucket/scratch' --driver-probe my.module:Probe

The run opens about 160 drivers, so its duration mostly depends on the time to connect. With
pytest-xdist, ``-n 4`` runs four cases at once, each process below its own prefix.

The run works below a fresh prefix of the URI and removes it afterwards. Trials that need something
the driver's traits rule out are reported as not applicable. ``Driver.deviations`` lists the trials
that a storage cannot pass, each with the reason. The final report counts both. A declared deviation
that passes is a failure.

A probe (:class:`holdfast.drivers.conformance.probes.Probe`) accesses the same storage without the
driver, so that trials can check what is really stored. Files and memory have a built-in probe. For
other storages, pass one; otherwise the trials that need it do not apply.

A trial's name is the function's name without ``test_``; ``-k NAME`` runs it alone.

Layout: ``plugin`` registers the options with pytest and starts a session, ``report`` counts
results, ``conftest`` creates places, ``trials`` contains shared helpers, and ``test_*`` contain the
trials. The package itself imports nothing from here: only the kit needs pytest and hypothesis.
"""
