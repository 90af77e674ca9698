"""Adapters for the contents of a state: modules, optimizers, meshes, random generators, objects."""
