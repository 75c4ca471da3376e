"""Who holds what: deterministic from a key."""

import numpy as np

from baffle.core.arrays import I64
from baffle.core.seeds import permutation
from baffle.errors import PlanError


def iid(key: bytes, samples: int, clients: int) -> list[I64]:
    """Samples in random order, dealt out in shares that differ by at most one."""
    if clients > samples:
        raise PlanError(
            f"federation.clients: {clients} clients cannot share {samples} samples; set it to at most {samples}"
        )
    return np.array_split(permutation(key, samples), clients)
