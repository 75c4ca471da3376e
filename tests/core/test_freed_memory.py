"""Freed memory that is kept costs no page faults when it is used again."""

import subprocess
import sys

import pytest

FAULTS = """
import resource
import numpy as np
from baffle.core.freed_memory import keep_freed_memory

if {kept}:
    keep_freed_memory()

def work():
    vectors = [np.ones(900_000, np.float32) for _ in range(6)]
    return sum(float(vector[0]) for vector in vectors)

work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc gives memory back")
def test_kept_memory_is_not_faulted_in_again() -> None:
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", FAULTS.format(kept=kept)], check=True, capture_output=True).stdout)
        for kept in (True, False)
    )
    assert kept < given_back / 5
