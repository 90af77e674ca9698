"""Workloads and measurements of the soak, which ``tests/soak/run.py`` runs."""
