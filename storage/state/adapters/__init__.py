"""What a state is made of: modules, optimizers, meshes, random number generators, other objects."""
