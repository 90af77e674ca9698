"""Storage drivers: the contract, the built-in backends, and the layers around them. No torch."""
