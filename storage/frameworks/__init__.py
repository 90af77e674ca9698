"""What frameworks keep their state in: modules, optimizers, meshes, random number generators."""
