"""What glibc does with freed memory: keep it for work that allocates the same few megabytes again and again, or return
it to the system at once for clients with little memory."""

import ctypes
import sys
from functools import cache

import numpy as np

BLOCK_BYTES = 31 << 20  # just below the 32 MB up to which glibc learns from freed blocks
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's settings of the size from which freed memory goes back


@cache
def keep_freed_memory() -> None:
    """Keep freed memory in the process, for work that allocates the same few megabytes again and again.

    By default glibc returns large blocks to the system, and each page of the next block then costs a page fault: a
    sixth of the time of a forward pass of WRN-10-2, and a quarter of that of replaying a round of a million weights.
    After freeing one large block, glibc keeps blocks up to that size, and twice as much in total. Has no effect if
    malloc was configured explicitly.
    """
    np.empty(BLOCK_BYTES, np.uint8)


def give_back_freed_memory(threshold: int = 1 << 18) -> None:
    """Return freed blocks of at least `threshold` bytes to the system at once. This costs page faults and cannot be
    undone in this process. By default glibc keeps larger and larger blocks; other C libraries need no setting."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        for setting in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            library.mallopt(setting, threshold)
