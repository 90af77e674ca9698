"""Driver options from the environment and from configuration files, and the trust checks on those
files."""
