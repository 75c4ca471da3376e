"""The exact arithmetic: pure functions of arrays and bytes, with no I/O, clock or global state."""
