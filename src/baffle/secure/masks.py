"""Masks: random vectors in the ring that cancel between two clients, or that a client alone knows.

A mask is the key stream of ChaCha20 under a key that is used once. Masked vectors are uniform in the ring, so they tell
nothing; masks are exact, so a sum from which they have gone is the plain sum, bit for bit.
"""

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from baffle.core.ring import ELEMENT, RingVector
from baffle.errors import RefusalError

KEY_BYTES = 32


def agree(private: X25519PrivateKey, public: bytes) -> bytes:
    """The secret that two clients share: each gets it from its own private and the other's public key."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # a key of low order, which would make the secret known to everybody
        raise RefusalError("a public key that nobody can agree with") from None


def derive(secret: bytes, context: bytes, purpose: str) -> bytes:
    """A key for one purpose in one context, from whatever secret."""
    return HKDF(SHA256(), length=KEY_BYTES, salt=context, info=f"baffle/{purpose}/1".encode()).derive(secret)


def expand(key: bytes, context: bytes, purpose: str) -> bytes:
    """The same from a key that was derived before: at half the price."""
    return HKDFExpand(SHA256(), length=KEY_BYTES, info=f"baffle/{purpose}/1".encode() + context).derive(key)


def stream(key: bytes, length: int) -> RingVector:
    """So many ring elements of the key stream. A key must never serve two vectors."""
    encryptor = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(ELEMENT.itemsize * length)), dtype=ELEMENT)


def self_mask(seed: bytes, context: bytes, length: int) -> RingVector:
    """The mask that keeps a vector hidden even when all its pairwise masks have become known."""
    return stream(derive(seed, context, "self-mask"), length)


def pair_mask(secret: bytes, context: bytes, length: int, *, plus: bool) -> RingVector:
    """The mask between two clients; one of them adds it and the other takes it away."""
    mask = stream(derive(secret, context, "pair-mask"), length)
    return mask if plus else np.negative(mask)
