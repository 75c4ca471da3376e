"""The contexts that keys, masks and signatures are bound to, so that none can be used for another purpose."""

import struct
from collections.abc import Iterable
from hashlib import sha256

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from baffle.aggregation.messages import DIGEST_BYTES, Advertisement, Opening
from baffle.core.messages import RoundRequest, encode
from baffle.errors import RefusalError


def key_context(run: bytes, session: bytes, owner: int, slot: int) -> bytes:
    """Binds a mask key to a run, a slot, its owner and its owner's session. It exists before the round does."""
    return sha256(b"baffle/key-context/1" + run + session + struct.pack(">QQ", slot, owner)).digest()


def keys_digest(run: bytes, advertisements: Iterable[Advertisement], slot: int) -> bytes:
    """One hash for the keys of all participants."""
    return sha256(b"".join(key_context(run, keys.session, keys.sender, slot) for keys in advertisements)).digest()


def round_context(keys: bytes, opening: Opening, request: RoundRequest, participants: tuple[int, ...]) -> bytes:
    """Binds masks to everything that a round is about. A client that was sent another past, other weights, other
    participants or another threshold than the rest masks with other streams, and the server gets noise."""
    about = (request.round, opening.slot, opening.threshold, opening.floor)
    lists = b"".join(_counted(numbers) for numbers in (about, participants, opening.members))
    fixed = request.trajectory + request.chain + request.weights_hash
    return sha256(b"baffle/round-context/2" + keys + fixed + lists).digest()


def survivors_text(run: bytes, context: bytes, alive: tuple[int, ...]) -> bytes:
    """The text that clients sign to agree on the survivors of a round."""
    return b"baffle/survivors/1" + run + context + _counted(alive)


def state_text(run: bytes, round_number: int, chain: bytes) -> bytes:
    """The text that clients sign about the state before a round, once for each round of a run."""
    return b"baffle/state/2" + length_prefixed(run, round_number.to_bytes(8, "big"), chain)


def box_context(key: bytes, sender: int, receiver: int) -> bytes:
    """Binds the encryption of a share to one direction of one channel and one slot, so that no nonce can repeat."""
    return key + struct.pack(">QQ", sender, receiver)


def seed_commitment(run: bytes, slot: int, sender: int, seed: bytes) -> bytes:
    """A client's commitment to its self mask's seed. The seed is random, so the commitment reveals nothing."""
    fields = length_prefixed(run, struct.pack(">Q", slot), struct.pack(">Q", sender), seed)
    return sha256(b"baffle/seed/2" + fields).digest()


def share_digest(run: bytes, slot: int, dealer: int, holder: int, place: int, share: bytes) -> bytes:
    """A dealer's digest of the share at one place of a holder's box. It distinguishes a holder that was dealt a wrong
    share from one that releases a wrong share."""
    numbers = struct.pack(">QQQQ", slot, dealer, holder, place)
    return sha256(b"baffle/share/2" + length_prefixed(run, numbers, share)).digest()[:DIGEST_BYTES]


def sign(identity: Ed25519PrivateKey, run: bytes, unsigned: Advertisement) -> Advertisement:
    return Advertisement(*_fields(unsigned), identity.sign(_signed_bytes(run, unsigned)))


def require_signed_keys(public: bytes, run: bytes, advertisement: Advertisement) -> None:
    if not signed(public, advertisement.signature, _signed_bytes(run, advertisement)):
        raise RefusalError(f"the keys of client {advertisement.sender} are not signed by it")


def signed(public: bytes, signature: bytes, text: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def length_prefixed(*fields: bytes) -> bytes:
    """Each field after its length, so that no two lists of fields give the same text."""
    return b"".join([len(field).to_bytes(8, "big") + field for field in fields])


def split_prefixed(text: bytes) -> list[bytes]:
    """The fields of a length-prefixed text."""
    fields, at = [], 0
    while at < len(text):
        size = int.from_bytes(text[at : at + 8], "big")
        at += 8 + size
        if at > len(text):
            raise RefusalError("a text that ends in the middle of a field")
        fields.append(text[at - size : at])
    return fields


def _counted(numbers: tuple[int, ...]) -> bytes:
    return struct.pack(f">{len(numbers) + 1}Q", len(numbers), *numbers)


def _fields(advertisement: Advertisement) -> tuple[int, bytes, bytes, int, tuple[bytes, ...]]:
    """All fields but the signature."""
    a = advertisement
    return a.sender, a.session, a.channel, a.first, a.keys


def _signed_bytes(run: bytes, advertisement: Advertisement) -> bytes:
    return b"baffle/advertisement/1" + run + encode(Advertisement(*_fields(advertisement), bytes(64)))
