"""How much memory something takes."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Fails if Python and NumPy ask for more than this many bytes at any moment inside, touched or not."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= size, f"{peak:,} bytes, expected at most {size:,}"
