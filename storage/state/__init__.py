"""Between the trainer's state and bytes in host memory. All modules here know torch."""
