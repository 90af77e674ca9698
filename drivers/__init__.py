"""How bytes reach one kind of storage: one file a backend, one contract. No torch."""
