"""What a client knows of the others: their signed keys, and a sealed channel to each."""

from collections.abc import Callable, Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from baffle.aggregation.context import box_context, key_context, require_signed_keys
from baffle.aggregation.masks import agree, derive, expand
from baffle.aggregation.messages import Advertisement, Key, Opening
from baffle.core.messages import Message, decode
from baffle.errors import RefusalError

NO_NONCE = bytes(12)
"""Every box has a key of its own, so its nonce is fixed."""


ReadKeys = Callable[[bytes], Advertisement]
"""A list of keys from the bytes that its owner has signed, or a refusal."""


def reader(directory: Mapping[int, bytes], run: bytes) -> ReadKeys:
    """Reads the lists of keys of known identities."""

    def read(data: bytes) -> Advertisement:
        advertisement = decode(data, Advertisement)
        if advertisement.sender not in directory:
            raise RefusalError(f"keys of client {advertisement.sender}, whom nobody knows")
        require_signed_keys(directory[advertisement.sender], run, advertisement)
        return advertisement

    return read


class FrozenPeers(Message, frozen=True, tag="frozen-peers"):
    """What a client knows of the others, and its private key for channels to them. The channels follow."""

    channel: Key
    advertised: tuple[Advertisement, ...]


class Peers:
    """The newest keys of every client that this one has heard of, itself included."""

    def __init__(self, number: int, run: bytes, read: ReadKeys, frozen: FrozenPeers | None = None) -> None:
        self._number, self._run, self._read = number, run, read
        self._channel = X25519PrivateKey.from_private_bytes(frozen.channel) if frozen else X25519PrivateKey.generate()
        self._channels: dict[tuple[int, bytes], bytes] = {}
        self._advertised = {one.sender: one for one in frozen.advertised} if frozen else {}

    def frozen(self) -> FrozenPeers:
        return FrozenPeers(self._channel.private_bytes_raw(), tuple(self._advertised.values()))

    @property
    def channel_key(self) -> bytes:
        return self._channel.public_key().public_bytes_raw()

    def take_own(self, advertisement: Advertisement) -> None:
        self._advertised[self._number] = advertisement

    def take(self, opening: Opening, neighbours: list[int], own_key: bytes) -> None:
        """The lists of keys that come with an opening. Together with those known they must give every neighbour a key
        of its own; otherwise nothing is taken."""
        known = dict(self._advertised)
        for data in opening.advertisements:
            advertisement = self._read(data)
            sender = advertisement.sender
            if sender == self._number or sender not in opening.members:
                raise RefusalError(f"keys of client {sender}, who is no peer of this client in slot {opening.slot}")
            if sender in known and advertisement.first < known[sender].first:
                raise RefusalError(f"keys of client {sender} that are older than others of it")
            known[sender] = advertisement
        keys = [own_key, *(_key(known, peer, opening.slot) for peer in neighbours)]
        if len(set(keys)) != len(keys):
            raise RefusalError(f"two clients have the same key in slot {opening.slot}")
        self._advertised = known

    def forget_keys_before(self, slot: int) -> None:
        """Forget lists that have come to their end: in a large federation a client meets others in every round."""
        kept = {peer: one for peer, one in self._advertised.items() if one.first + len(one.keys) > slot}
        self._advertised = kept
        self._channels = {pair: key for pair, key in self._channels.items() if pair[0] in kept}

    def key(self, peer: int, slot: int) -> bytes:
        """A client's public mask key for a slot."""
        return _key(self._advertised, peer, slot)

    def seal(self, slot: int, texts: Mapping[int, bytes]) -> bytes:
        """For each receiver in turn a box that only it can open, and only as this client's for this slot."""
        own = key_context(self._run, self._of(self._number), slot)

        def box(receiver: int, text: bytes) -> bytes:
            key = expand(self._channel_to(receiver), box_context(own, self._number, receiver), "box")
            return ChaCha20Poly1305(key).encrypt(NO_NONCE, text, None)

        return b"".join(box(receiver, text) for receiver, text in texts.items())

    def open(self, slot: int, sender: int, box: bytes) -> bytes | None:
        """What is in a box, or none where its sender did not seal it for this client and slot."""
        its = key_context(self._run, self._of(sender), slot)
        key = expand(self._channel_to(sender), box_context(its, sender, self._number), "box")
        try:
            return ChaCha20Poly1305(key).decrypt(NO_NONCE, box, None)
        except InvalidTag:
            return None

    def _of(self, peer: int) -> Advertisement:
        return _known(self._advertised, peer)

    def _channel_to(self, peer: int) -> bytes:
        pair = (peer, self._of(peer).channel)
        if pair not in self._channels:
            self._channels[pair] = derive(agree(self._channel, pair[1]), b"", "channel")
        return self._channels[pair]


def _known(advertised: Mapping[int, Advertisement], peer: int) -> Advertisement:
    if peer not in advertised:
        raise RefusalError(f"no keys of client {peer}")
    return advertised[peer]


def _key(advertised: Mapping[int, Advertisement], peer: int, slot: int) -> bytes:
    advertisement = _known(advertised, peer)
    if not 0 <= slot - advertisement.first < len(advertisement.keys):
        raise RefusalError(f"no key of client {peer} for slot {slot}")
    return advertisement.keys[slot - advertisement.first]
