"""The exact half of the system: pure functions of arrays and bytes, with no I/O, clock or global state."""
