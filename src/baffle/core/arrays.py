"""Names for the arrays that the code passes around, and two numbers that are taken of them."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]  # weights, gradients and optimizer state: one flat vector, a number per weight
F64: TypeAlias = NDArray[np.float64]  # losses and scalars, before they become integers
U8: TypeAlias = NDArray[np.uint8]  # bytes of a key stream, or raw pixels
I32: TypeAlias = NDArray[np.int32]  # ring elements read as signed numbers
I64: TypeAlias = NDArray[np.int64]  # exact sums, labels and indices
Integers: TypeAlias = NDArray[np.signedinteger[Any]]  # rows of directions: int16 for gaussian, int8 for rademacher


def rms(values: F32 | F64) -> float:
    """The root mean square; not finite if a value is not."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def ranks(outputs: F32, labels: I64) -> I64:
    """For each row of outputs, how many classes come before its label: 0 if the label is the model's answer.

    Equal outputs are ranked in their order, as in `argmax`. An output that is not a number comes before all others, and
    a label with such an output comes last.
    """
    own = outputs[np.arange(len(labels)), labels][:, None]
    columns = np.arange(outputs.shape[1])
    earlier = columns < labels[:, None]
    before = np.where(earlier, ~(outputs < own), ~(outputs <= own)) & (columns != labels[:, None])
    return np.asarray(before.sum(1), np.int64)
