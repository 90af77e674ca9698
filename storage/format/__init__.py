"""The format of a checkpoint's bytes: manifest, columns, small values, checksums."""
