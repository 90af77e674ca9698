"""``holdfast keeper``: a group of commands, one in each module."""
