"""Pure decisions of keepers: no I/O, no clock, no event loop."""
