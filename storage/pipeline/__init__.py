"""Images as they move: written, read, packed and unpacked."""
