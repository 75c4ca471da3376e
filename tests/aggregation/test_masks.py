"""Masks agree between two clients, cancel exactly, and are the key stream of RFC 8439."""

import secrets
from contextlib import suppress
from string import ascii_lowercase

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from hypothesis import given
from hypothesis.strategies import binary, text

from baffle.aggregation.masks import agree, derive, expand, is_low_order, pair_mask, self_mask, stream
from baffle.core.ring import add
from baffle.errors import RefusalError

LOW_ORDER = [
    bytes(32),
    (1).to_bytes(32, "little"),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    (2**255 - 20).to_bytes(32, "little"),
    (2**255 - 19).to_bytes(32, "little"),
    (2**255 - 18).to_bytes(32, "little"),
]


def public(private: X25519PrivateKey) -> bytes:
    return private.public_key().public_bytes_raw()


@given(secret=binary(max_size=80), context=binary(max_size=80), purpose=text(ascii_lowercase, max_size=20))
def test_keys_are_those_of_hkdf(secret: bytes, context: bytes, purpose: str) -> None:
    info = f"baffle/{purpose}/1".encode()
    assert derive(secret, context, purpose) == HKDF(SHA256(), length=32, salt=context, info=info).derive(secret)
    assert expand(secret, context, purpose) == HKDFExpand(SHA256(), length=32, info=info + context).derive(secret)


@pytest.mark.parametrize("highest_bit", [0, 2**255])
def test_a_key_of_low_order_is_refused_and_told_without_agreeing(highest_bit: int) -> None:
    private = X25519PrivateKey.generate()
    points = {int.from_bytes(key, "little") + distance for key in LOW_ORDER for distance in range(-40, 41)}
    refused = 0
    for point in sorted(point for point in points if 0 <= point < 2**255):
        key = (point + highest_bit).to_bytes(32, "little")
        with suppress(RefusalError):
            agree(private, key)
            assert not is_low_order(key)
            continue
        assert is_low_order(key)
        refused += 1
    assert refused == len(LOW_ORDER)
    for size in (0, 31, 33):
        with pytest.raises(RefusalError):
            agree(private, bytes(size))


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 1000])
def test_pair_masks_cancel_exactly(length: int) -> None:
    one, other = (X25519PrivateKey.generate() for _ in range(2))
    plus = pair_mask(agree(one, public(other)), b"here", length, plus=True)
    minus = pair_mask(agree(other, public(one)), b"here", length, plus=False)
    assert plus.dtype == minus.dtype == np.uint32
    assert len(plus) == len(minus) == length
    assert not add([plus, minus]).any()
    vector = np.frombuffer(secrets.token_bytes(4 * length), dtype="<u4")
    assert np.array_equal(add([minus, vector, plus]), vector)


def test_the_stream_is_the_rfc_vector() -> None:
    """RFC 8439, A.1, vectors 1 and 2: a key of zeros, blocks 0 and 1."""
    known = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )
    assert stream(bytes(32), 32).tobytes().hex() == known
    assert stream(bytes(32), 5).tobytes().hex() == known[:40]


def test_a_mask_fits_one_secret_one_context_and_one_purpose() -> None:
    secret, other = secrets.token_bytes(32), secrets.token_bytes(32)
    masks = [
        pair_mask(secret, b"here", 8, plus=True),
        pair_mask(secret, b"there", 8, plus=True),
        pair_mask(other, b"here", 8, plus=True),
        self_mask(secret, b"here", 8),
        self_mask(secret, b"there", 8),
        self_mask(other, b"here", 8),
    ]
    assert len({mask.tobytes() for mask in masks}) == len(masks)
    assert derive(secret, b"here", "box") not in {derive(secret, b"here", p) for p in ("pair-mask", "self-mask")}
