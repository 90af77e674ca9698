"""``holdfast keeper``: keepers of this host, and how often to keep what."""
