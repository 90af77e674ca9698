"""How bytes move: which step runs next, memory for it, images read and written."""
