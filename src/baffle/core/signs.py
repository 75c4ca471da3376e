"""Numbers of ±1 from the bits of a key's stream: bit i of stream k is number i, the lowest bit of a byte first."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import U8, Integers
from baffle.core.seeds import BLOCK, Scratch, keystream, look_up

BITS = 8 * BLOCK
"""Numbers in one block of the stream."""


def signs(key: bytes, lanes: Sequence[int], start: int, stop: int, scratch: Scratch | None = None) -> Integers:
    """Numbers `start` to `stop` of each stream in `lanes`, a row each. The result lies in `scratch`."""
    scratch = scratch or Scratch()
    first = start // BITS
    stream = keystream(key, lanes, first, -(-stop // BITS) - first, scratch)
    skip = start - first * BITS
    return decode_signs(stream, scratch)[:, skip : skip + stop - start]


@cache
def signs_table() -> NDArray[np.uint64]:
    """The eight numbers of each possible byte of the stream, as int8, packed into one uint64."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    table: NDArray[np.uint64] = (2 * bits.view(np.int8) - 1).view(np.uint64)[:, 0]
    table.flags.writeable = False
    return table


def decode_signs(stream: U8, scratch: Scratch) -> Integers:
    return look_up(signs_table(), stream, scratch).view(np.int8)
