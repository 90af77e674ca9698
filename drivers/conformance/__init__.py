"""The conformance kit: does a driver keep the contract of :mod:`holdfast.drivers.contract`? Run it
with pytest.

    pip install pytest hypothesis
    pytest -v --pyargs holdfast.drivers.conformance --driver-uri memory://anything
    pytest -v --pyargs holdfast.drivers.conformance \\
        --driver-uri 's3://bucket/scratch' --driver-probe my.module:Probe

How long that takes is mostly how long some 300 drivers take to connect; the first lines say what to
expect. With pytest-xdist, ``-n 4`` runs four cases at once, each process below a prefix of its own.

The run works below a fresh prefix of the URI, and removes it. Trials that ask for what a driver's
traits deny say so and are not applicable; ``Driver.deviations`` names the trials that a storage
cannot pass, each with its reason. The report at the end counts both. A declared deviation that
passes is a failure.

A probe (:class:`holdfast.drivers.conformance.probes.Probe`) reaches the same storage by other
means: what must not be there is looked for around the driver. Files and memory have one; for others
name one, or trials that need it do not apply.

A trial's name is its function's, without ``test_``; ``-k NAME`` runs it alone.

Layout: ``plugin`` adds the options to pytest and begins a session, ``report`` counts, ``conftest``
makes places, ``trials`` is what trials share, ``test_*`` are the trials. Nothing here is imported
by the package itself: pytest and hypothesis are needed by the kit alone.
"""
