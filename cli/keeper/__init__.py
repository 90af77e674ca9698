"""``holdfast keeper``: a group of commands, one module each."""
