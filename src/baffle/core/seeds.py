"""Keys for every random choice of a run, derived from its root seed by hashing, and the streams of numbers of a key.

Anybody who knows the root seed can repeat all of it, so nothing that must stay secret may come from here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import DTypeLike, NDArray

from baffle.core.arrays import I64, U8, Integers

Purpose = Literal[
    "directions", "local", "batches", "augment", "init", "partition", "participation", "groups", "tiers", "dropout"
]
"""What a key is for. Two purposes never share a key."""

OF_THE_TRAJECTORY: frozenset[Purpose] = frozenset({"directions", "local"})
"""Purposes whose keys change with anything that changes the weights. The others depend on the root seed alone, so two
plans with one seed start from the same weights, on the same clients, with the same batches, and can be compared."""

SALTED: frozenset[Purpose] = frozenset({"directions", "local", "batches", "augment", "participation", "groups"})
"""Purposes whose keys also depend on a networked run's salt, so that two runs of one plan never ask the same question.
Initial weights, partition and tiers follow from the plan alone."""

BLOCK = 16  # bytes in one block of the stream
BITS = 8 * BLOCK  # numbers of ±1 in one block of the stream

BIG_ENDIAN = np.dtype(">u8")


@dataclass(frozen=True)
class Seeds:
    """The root of all keys of one run: its seed, the digest of what determines its weights, and, in a network, the salt
    that its clients and its server have agreed on. A simulation has none."""

    root: int
    digest: bytes
    salt: bytes = b""

    def key(self, purpose: Purpose, *numbers: int) -> bytes:
        """32 bytes for one purpose and, say, one round and group."""
        salted = bool(self.salt) and purpose in SALTED
        info = f"baffle/{purpose}/{2 if salted else 1}".encode() + b"".join(n.to_bytes(8, "big") for n in numbers)
        salt = self.salt + self.digest if salted else self.digest if purpose in OF_THE_TRAJECTORY else None
        return HKDF(SHA256(), length=32, salt=salt, info=info).derive(self.root.to_bytes(8, "big"))


class Scratch:
    """Memory that is reused, because getting fresh memory can take longer than writing to it."""

    def __init__(self) -> None:
        self._kept = dict[str, NDArray[Any]]()

    def array(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array, not cleared, that is valid until the next one with the same name is asked for."""
        size = prod(shape)
        kept = self._kept.get(name)
        if kept is None or kept.size < size or kept.dtype != dtype:
            kept = self._kept[name] = np.empty(size, dtype)
        return kept[:size].reshape(shape)


def keystream(key: bytes, lanes: Sequence[int], first: int, blocks: int, scratch: Scratch | None = None) -> U8:
    """AES-256 in counter mode: for each lane (a row of the result), `blocks` blocks from block number `first` on.

    The counter block is the lane and the block number, both big-endian uint64. The counters are written out and
    encrypted block by block, so that one call serves many short lanes. The result lies in `scratch`.
    """
    scratch = scratch or Scratch()
    counters = scratch.array("counters", (len(lanes), blocks, 2), BIG_ENDIAN)
    stream = scratch.array("stream", (counters.nbytes + BLOCK - 1,), np.uint8)
    written = 0
    if counters.size:
        # Made big-endian before they are spread out, so that bytes are swapped once a lane or block, not once a pair.
        counters[:, :, 0] = np.array(lanes, dtype=np.uint64).astype(BIG_ENDIAN)[:, None]
        counters[:, :, 1] = np.arange(first, first + blocks, dtype=np.uint64).astype(BIG_ENDIAN)
        # ECB of distinct counter blocks is the key stream of CTR mode; nothing is encrypted with it.
        encryptor = Cipher(AES256(key), ECB()).encryptor()
        written = encryptor.update_into(counters.data.cast("B"), stream.data)
    return stream[:written].reshape(len(lanes), blocks * BLOCK)


def look_up(table: NDArray[Any], codes: NDArray[Any], scratch: Scratch) -> NDArray[Any]:
    """The entry of a table for each code of a stream. Every code must be in the table. The result lies in `scratch`."""
    index = scratch.array("index", codes.shape, np.intp)
    np.copyto(index, codes)  # `take` would do the same, but into fresh memory
    numbers = scratch.array("numbers", codes.shape, table.dtype)
    return table.take(index, out=numbers, mode="wrap")  # "wrap" skips checking that codes are in the table


def signs(key: bytes, lanes: Sequence[int], start: int, stop: int, scratch: Scratch | None = None) -> Integers:
    """Numbers `start` to `stop` of ±1 of each stream in `lanes`, a row each. Bit i of a stream is number i, the lowest
    bit of a byte first. The result lies in `scratch`."""
    scratch = scratch or Scratch()
    first = start // BITS
    stream = keystream(key, lanes, first, -(-stop // BITS) - first, scratch)
    skip = start - first * BITS
    return decode_signs(stream, scratch)[:, skip : skip + stop - start]


@cache
def _signs_table() -> NDArray[np.uint64]:
    """The eight numbers of each possible byte of the stream, as int8, packed into one uint64."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    table: NDArray[np.uint64] = (2 * bits.view(np.int8) - 1).view(np.uint64)[:, 0]
    table.flags.writeable = False
    return table


def decode_signs(stream: U8, scratch: Scratch) -> Integers:
    return look_up(_signs_table(), stream, scratch).view(np.int8)


def permutation(key: bytes, n: int) -> I64:
    """A random order of the numbers 0 to n − 1: each draws a random uint64, and they are sorted by it."""
    tickets = keystream(key, range(1), 0, -(-n // 2)).view("<u8")[0, :n]
    return np.argsort(tickets, kind="stable")


def batch_indices(key_of: Callable[[int], bytes], n: int, size: int, turn: int) -> I64:
    """The samples of batch number `turn` in repeated laps through n samples, each lap in a new random order.

    `key_of(lap)` gives the key of one lap, so any batch can be computed without those before it. Every sample is used
    once before any is used twice.
    """
    start = turn * size
    stop = start + size
    laps = range(start // n, -(-stop // n))
    order = np.concatenate([permutation(key_of(lap), n) for lap in laps])
    return order[start - laps.start * n : stop - laps.start * n]
