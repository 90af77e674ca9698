"""Plans reads and writes: pure functions over shapes and byte ranges. No I/O, no clock, no
torch."""
