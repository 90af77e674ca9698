"""From the trainer's state to bytes in host memory, and back: everything here knows torch."""
