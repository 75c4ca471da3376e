"""Names for the arrays that the code passes around."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
"""Weights, gradients and optimizer state: one flat vector, a number per weight."""

F64: TypeAlias = NDArray[np.float64]
"""Losses and scalars, before they become integers."""

U8: TypeAlias = NDArray[np.uint8]
"""Bytes of a key stream, or raw pixels."""

I32: TypeAlias = NDArray[np.int32]
"""Ring elements read as signed numbers."""

I64: TypeAlias = NDArray[np.int64]
"""Exact sums, labels and indices."""

Integers: TypeAlias = NDArray[np.signedinteger[Any]]
"""Rows of directions: int16 for gaussian, int8 for rademacher."""
