"""What makes a fork safe at any moment of a save: ``renewal`` of locks and state in the child, and ``cached`` properties
without locks. The bottom of the house, together with ``errors``: every room may import it."""
