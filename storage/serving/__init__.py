"""Memory of this process, served to other hosts as a storage."""
