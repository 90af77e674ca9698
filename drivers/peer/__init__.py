"""Memory of keepers on other hosts, over HTTP, for reading only."""
