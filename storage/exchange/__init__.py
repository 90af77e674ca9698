"""Exchange of loaded bytes between ranks, over mutually authenticated connections."""
