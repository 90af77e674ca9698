"""What the soak does to checkpoints, and what it measures meanwhile; ``tests/soak/run.py`` runs it."""
