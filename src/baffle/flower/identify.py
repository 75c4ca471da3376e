"""How a node of Flower says which client it is. Only clients on Flower need it: the link asks in its handshake."""

from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baffle.aggregation.context import length_prefixed
from baffle.aggregation.messages import Key, Signature
from baffle.core.messages import Message, Number, decode, encode
from baffle.errors import MessageError


class Who(Message, frozen=True, tag="who"):
    """To a node: which client are you? The challenge makes overheard answers worthless."""

    challenge: Key


class Me(Message, frozen=True, tag="me"):
    """From a node: the client that it is, signed with that client's key."""

    client: Number
    signature: Signature


Answer = Callable[[bytes], bytes]
"""A client: request → reply."""


def with_identity(identity: Ed25519PrivateKey, number: int, answer: Answer) -> Answer:
    """A client that also answers `Who`."""

    def answer_or_identify(data: bytes) -> bytes:
        try:
            who = decode(data, Who)
        except MessageError:
            return answer(data)
        return encode(Me(number, identity.sign(proof_text(who, number))))

    return answer_or_identify


def proof_text(who: Who, client: int) -> bytes:
    """What a client signs to say who it is."""
    return length_prefixed(b"baffle/flower-node/1", who.challenge, client.to_bytes(8, "big"))
