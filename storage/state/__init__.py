"""Between the trainer's state and bytes in host memory: everything here knows torch."""
