"""A second implementation of directions, version 1: only the standard library, with AES-256 and HKDF written by hand.

Run it to print the test vectors, as they stand in tests/vectors/directions.json. The client beside it draws its
directions with this code and a quicker AES.
"""

import hashlib
import hmac
import json
import math
import struct
import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from statistics import NormalDist
from typing import Any


def times(a: int, b: int) -> int:
    """The product in GF(2⁸) modulo x⁸ + x⁴ + x³ + x + 1."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a = a << 1 ^ (0x11B if a & 0x80 else 0)
        b >>= 1
    return product


def substitute(byte: int) -> int:
    """An entry of the S-box: the inverse in GF(2⁸) (0 for 0), then the affine map of FIPS-197, section 5.1.1."""
    inverse = next((other for other in range(256) if times(byte, other) == 1), 0)
    return inverse ^ rotate(inverse, 1) ^ rotate(inverse, 2) ^ rotate(inverse, 3) ^ rotate(inverse, 4) ^ 0x63


def rotate(byte: int, by: int) -> int:
    return (byte << by | byte >> 8 - by) & 0xFF


S_BOX = [substitute(byte) for byte in range(256)]
DOUBLE = [times(byte, 2) for byte in range(256)]
ROUNDS = 14


@cache
def round_keys(key: bytes) -> list[bytes]:
    """FIPS-197, section 5.2, for keys of eight words: a key of 16 bytes for every round and one before them."""
    words, constant = [key[i : i + 4] for i in range(0, 32, 4)], 1
    for i in range(8, 4 * (ROUNDS + 1)):
        word = words[-1]
        if i % 8 == 0:
            word = bytes(S_BOX[b] for b in word[1:] + word[:1])
            word = bytes([word[0] ^ constant]) + word[1:]
            constant = times(constant, 2)
        elif i % 8 == 4:
            word = bytes(S_BOX[b] for b in word)
        words.append(xor(word, words[i - 8]))
    return [b"".join(words[i : i + 4]) for i in range(0, len(words), 4)]


def xor(a: bytes, b: bytes) -> bytes:
    return bytes(x ^ y for x, y in zip(a, b, strict=True))


def shift_rows(state: bytes) -> bytes:
    """Byte i of a block is in row i mod 4 and column ⌊i/4⌋; row r is rotated left by r columns."""
    return bytes(state[(i + 4 * (i % 4)) % 16] for i in range(16))


def mix_column(a: int, b: int, c: int, d: int) -> tuple[int, ...]:
    everything = a ^ b ^ c ^ d
    return tuple(x ^ everything ^ DOUBLE[x ^ following] for x, following in ((a, b), (b, c), (c, d), (d, a)))


def encrypt(key: bytes, block: bytes) -> bytes:
    """AES-256 of one block."""
    first, *middle, last = round_keys(key)
    state = xor(block, first)
    for round_key in middle:
        state = shift_rows(bytes(S_BOX[b] for b in state))
        mixed = b"".join(bytes(mix_column(*state[i : i + 4])) for i in range(0, 16, 4))
        state = xor(mixed, round_key)
    return xor(shift_rows(bytes(S_BOX[b] for b in state)), last)


def by_hand(key: bytes, blocks: bytes) -> bytes:
    """AES-256 of every block."""
    return b"".join(encrypt(key, blocks[at : at + 16]) for at in range(0, len(blocks), 16))


Cipher = Callable[[bytes, bytes], bytes]
"""Key and blocks → every block, encrypted by AES-256."""


def hkdf(ikm: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 with SHA-256 for 32 bytes, which are one step of its expansion."""
    return hmac.digest(hmac.digest(salt or bytes(32), ikm, "sha256"), info + b"\x01", "sha256")


def key_of(root: int, salt: bytes, purpose: str, *numbers: int) -> bytes:
    info = f"baffle/{purpose}/1".encode() + struct.pack(f">{len(numbers)}Q", *numbers)
    return hkdf(struct.pack(">Q", root), salt, info)


def salted_key_of(root: int, digest: bytes, salt: bytes, purpose: str, *numbers: int) -> bytes:
    """In a networked run, whose clients have agreed on a salt."""
    info = f"baffle/{purpose}/2".encode() + struct.pack(f">{len(numbers)}Q", *numbers)
    return hkdf(struct.pack(">Q", root), salt + digest, info)


@cache
def gaussian_table() -> list[int]:
    quantiles = [NormalDist().inv_cdf((2 * i + 1) / 131072) for i in range(65536)]
    deviation = math.sqrt(math.fsum(q * q for q in quantiles) / 65536)
    return [round(q / deviation * 4096) for q in quantiles]


def stream_byte_range(key: bytes, k: int, start: int, stop: int, cipher: Cipher = by_hand) -> bytes:
    """Bytes `start` to `stop` of stream k."""
    first = start // 16
    counters = b"".join(struct.pack(">QQ", k, block) for block in range(first, (stop + 15) // 16))
    return cipher(key, counters)[start - 16 * first : stop - 16 * first]


def gaussian(key: bytes, k: int, start: int, stop: int, cipher: Cipher = by_hand) -> list[int]:
    numbers = struct.unpack(f"<{stop - start}H", stream_byte_range(key, k, 2 * start, 2 * stop, cipher))
    return [gaussian_table()[number] for number in numbers]


def rademacher(key: bytes, k: int, start: int, stop: int, cipher: Cipher = by_hand) -> list[int]:
    first = start // 8
    stream = stream_byte_range(key, k, first, (stop + 7) // 8, cipher)
    return [2 * (stream[i // 8 - first] >> i % 8 & 1) - 1 for i in range(start, stop)]


def outer(key: bytes, k: int, shapes: list[list[int]], start: int, stop: int) -> list[int]:
    """Weights `start` to `stop` of an outer direction. Its factors are numbers of the rademacher direction: for each
    matrix one for every row and then one for every column, for any other tensor one for every weight."""
    signs, weight, number = [], 0, 0
    for shape in shapes:
        size = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else size
        columns = size // rows if len(shape) > 1 else 0
        for i in range(max(start, weight) - weight, max(0, min(stop - weight, size))):
            row, column = divmod(i, columns) if columns else (i, 0)
            (z,) = rademacher(key, k, number + row, number + row + 1)
            if columns:
                z *= rademacher(key, k, number + rows + column, number + rows + column + 1)[0]
            signs.append(z)
        weight, number = weight + size, number + rows + columns
    return signs


def stretch(key: bytes, k: int, n: int, cipher: Cipher = by_hand) -> float:
    """On the sphere, the factor from a direction's integers, in units of 2⁻¹², to the direction of n weights."""
    square = sum(z * z for z in gaussian(key, k, 0, n, cipher))
    return math.sqrt((n << 24) / square) if square else 1.0


DRAW = {"gaussian": gaussian, "rademacher": rademacher}

UNSALTED: list[tuple[str, tuple[int, ...]]] = [
    *(("batches", (7, 11, 13)), ("batches", (7, 11)), ("augment", (7, 11, 13)), ("init", ()), ("partition", ())),
    *(("participation", (5,)), ("groups", (5,)), ("tiers", ())),
]
KEYS: list[tuple[int, bytes, str, tuple[int, ...]]] = [
    *((0, bytes(32), "directions", numbers) for numbers in ((0, 0), (1, 0), (0, 1))),
    (2**63 - 1, hashlib.sha256(b"a plan").digest(), "directions", (2**64 - 1, 3)),
    (20, hashlib.sha256(b"a plan").digest(), "local", (7, 11, 13)),
    *((20, b"", purpose, numbers) for purpose, numbers in UNSALTED),
    (0, b"", "dropout", (0, 0)),
    (2**63 - 1, b"", "dropout", (7, 2**32)),
]

SALTED = [("directions", (1, 0)), ("local", (7, 11, 13)), ("batches", (7, 11)), ("augment", (7, 11, 13))]
SALTED += [("participation", (5,)), ("groups", (5,))]
DIGEST, SALT = hashlib.sha256(b"a plan").digest(), hashlib.sha256(b"a salt").digest()

SLICES = [(0, 12), (1, 9), (5, 29), (7, 8), (121, 139), (1000, 1017), (2**40 + 3, 2**40 + 20)]
SIZES = [1, 2, 17, 1000]
MODELS: list[list[list[int]]] = [
    [[3, 4], [3]],
    [[7]],
    [[1, 5], [5, 1], [2], []],
    [[8, 1, 5, 5], [8], [16, 8, 5, 5], [16], [10, 256], [10]],
    [[2**20, 2**20], [2**20], [300, 200]],
]
PIECES: list[list[tuple[int, int]]] = [
    [(0, 15), (2, 9)],
    [(0, 7)],
    [(0, 13), (4, 11)],
    [(195, 215), (3400, 3430), (5980, 5994)],
    [(2**20 - 5, 2**20 + 7), (2**40 - 3, 2**40 + 9), (2**40 + 2**20 + 195, 2**40 + 2**20 + 207)],
]
NUMBERS = [0, 1, 255, 65537, 2**40, 2**64 - 1]


def vectors() -> dict[str, list[dict[str, Any]]]:
    """Integers that lose digits in some JSON readers are written as text."""
    keys = [key_of(root, salt, purpose, *numbers) for root, salt, purpose, numbers in KEYS]
    table = hashlib.sha256(struct.pack("<65536h", *gaussian_table())).hexdigest()
    found: dict[str, list[dict[str, Any]]] = {"tables": [{"distribution": "gaussian", "sha256": table}]}
    found["keys"] = [
        {"root": str(root), "salt": salt.hex(), "purpose": purpose, "numbers": _texts(*numbers), "key": key.hex()}
        for (root, salt, purpose, numbers), key in zip(KEYS, keys, strict=True)
    ]
    found["salted keys"] = []
    for purpose, numbers in SALTED:
        key = salted_key_of(20, DIGEST, SALT, purpose, *numbers).hex()
        known = {"root": "20", "digest": DIGEST.hex(), "salt": SALT.hex(), "purpose": purpose}
        found["salted keys"].append(known | {"numbers": _texts(*numbers), "key": key})
    found |= {"directions": [], "stretches": [], "outer": []}
    for name, draw in DRAW.items():
        for (i, k), (j, (start, stop)) in product(enumerate(NUMBERS), enumerate(SLICES)):
            known = {"key": keys[(i + j) % 4].hex(), "distribution": name, "k": str(k)}
            z = draw(keys[(i + j) % 4], k, start, stop)
            found["directions"].append(known | {"start": str(start), "stop": str(stop), "z": z})
    for (i, k), n in product(enumerate(NUMBERS), SIZES):
        key, factor = keys[i % 4].hex(), stretch(keys[i % 4], k, n).hex()
        found["stretches"].append({"key": key, "k": str(k), "n": n, "stretch": factor})
    for (i, k), (j, (shapes, pieces)) in product(enumerate(NUMBERS), enumerate(zip(MODELS, PIECES, strict=True))):
        for start, stop in pieces:
            z = outer(keys[(i + j) % 4], k, shapes, start, stop)
            ends = {"start": str(start), "stop": str(stop), "z": z}
            found["outer"].append({"key": keys[(i + j) % 4].hex(), "k": str(k), "shapes": shapes, **ends})
    return found


def _texts(*numbers: int) -> list[str]:
    return [str(number) for number in numbers]


def written(vectors: dict[str, list[dict[str, Any]]]) -> str:
    """Test vectors as JSON, one to a line."""
    parts = [
        f"  {json.dumps(name)}: [\n" + ",\n".join(f"    {json.dumps(row)}" for row in rows) + "\n  ]"
        for name, rows in vectors.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.stdout.write(written(vectors()))
