"""``holdfast bench --simulate`` and ``--dry-run``: forecasts of a job's saves and loads, without
any data.

``fleet`` plans for every rank with the engine's own functions. ``flat`` replaces the tensors, and
``fragments`` builds the ranks' reports to the leader. ``requests`` and ``rates`` turn bytes into
requests, money and time. ``forecast`` combines them, and ``dry_run`` describes a measurement.
"""
