"""Masks: random vectors in the ring that cancel between two clients, or that only one client knows.

A mask is the key stream of ChaCha20 under a key that is used once. Masked vectors are uniform in the ring, so they
reveal nothing. Masks are exact, so a sum without them is the plain sum, bit for bit.
"""

import hmac

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from baffle.core.ring import ELEMENT, RingVector
from baffle.errors import RefusalError


def agree(private: X25519PrivateKey, public: bytes) -> bytes:
    """The secret that two clients share: each derives it from its own private key and the other's public key."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # a key of low order, which would make the secret known to everybody
        raise RefusalError("a public key that nobody can agree with") from None


LOW_ORDER = {
    0,
    1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
    2**255 - 20,
    2**255 - 19,
    2**255 - 18,
}
"""The points of Curve25519 and its twist whose order divides 8, in every way that 255 bits can write them (RFC 7748,
section 6.1). With these, everybody agrees on zeros."""


def is_low_order(public: bytes) -> bool:
    """Whether `agree` refuses a key, whatever the private key is. A server asks this of every key of every client: it
    must cost less than an agreement."""
    return int.from_bytes(public, "little") % 2**255 in LOW_ORDER  # X25519 ignores the highest bit


def derive(secret: bytes, context: bytes, purpose: str) -> bytes:
    """A key for one purpose in one context, from any secret: HKDF-SHA256 with the context as salt."""
    return expand(hmac.digest(context, secret, "sha256"), b"", purpose)


def expand(key: bytes, context: bytes, purpose: str) -> bytes:
    """The same from a key that was derived before: only HKDF's second half, of which we take the first block. A round
    needs hundreds of these, and the library's HKDF takes seven times as long to set up."""
    return hmac.digest(key, f"baffle/{purpose}/1".encode() + context + b"\x01", "sha256")


def mask_key(secret: bytes, context: bytes) -> X25519PrivateKey:
    """A round's mask key, from the secret that its owner shares. With a context of its own (`key_context`) every key
    must be guessed by itself: one guess cannot be tried on many keys."""
    return X25519PrivateKey.from_private_bytes(derive(secret, context, "mask-key"))


def stream(key: bytes, length: int) -> RingVector:
    """The first `length` ring elements of the key stream. A key must never serve two vectors."""
    encryptor = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(ELEMENT.itemsize * length)), dtype=ELEMENT)


def self_mask(seed: bytes, context: bytes, length: int) -> RingVector:
    """The mask that still hides a vector when all its pairwise masks have become known."""
    return stream(derive(seed, context, "self-mask"), length)


def pair_mask(secret: bytes, context: bytes, length: int, *, plus: bool) -> RingVector:
    """The mask between two clients: one of them adds it and the other subtracts it."""
    mask = stream(derive(secret, context, "pair-mask"), length)
    return mask if plus else np.negative(mask)
