"""``holdfast bench --simulate`` and ``--dry-run``: forecasts of a job's saves and loads, without
any data.

``fleet`` plans for every rank with the engine's own functions. ``forecast`` turns the plans into
requests, money and time, and ``dry_run`` describes a measurement.
"""
