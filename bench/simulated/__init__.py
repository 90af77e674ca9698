"""``holdfast bench --simulate`` and ``--dry-run``: what a job would save, and what that would take,
without a byte of it.

``fleet`` plans for every rank by the engine's own functions, with ``flat`` in place of tensors and
``fragments`` for what ranks tell the leader; ``requests`` and ``rates`` turn bytes into requests,
money and time; ``forecast`` has all of that, and ``dry_run`` says what a measurement would do.
"""
