"""Images in motion: writing, reading, packing and unpacking them."""
