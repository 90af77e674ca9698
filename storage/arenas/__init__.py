"""Memory that outlives its writer, shared by trainers and keepers."""
