"""Thread pools, buffers, the engine's event loop and the scheduler."""
