"""What the bytes of a checkpoint mean: manifest, columns, small values, checksums."""
