"""Writing images from memory to storage and to the local level."""
