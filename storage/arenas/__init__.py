"""Memory that outlives its writer: what trainers and keepers have in common."""
