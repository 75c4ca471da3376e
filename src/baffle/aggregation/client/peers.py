"""A client's view of its peers: their signed keys, and an encrypted channel to each."""

from collections.abc import Callable, Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from baffle.aggregation.context import box_context, key_context, require_signed_keys, share_digest
from baffle.aggregation.masks import agree, derive, expand
from baffle.aggregation.messages import DIGEST_BYTES, Advertisement, Key, Opening
from baffle.aggregation.shares import SHARE_BYTES
from baffle.core.messages import Message, decode
from baffle.errors import RefusalError

NO_NONCE = bytes(12)  # every box has its own key, so the nonce can be fixed
ReadKeys = Callable[[bytes], Advertisement]
"""Turns a signed list of keys from bytes into an advertisement, or refuses it."""


def reader(directory: Mapping[int, bytes], run: bytes) -> ReadKeys:
    """A function that accepts lists of keys only from clients in the directory."""

    def read(data: bytes) -> Advertisement:
        advertisement = decode(data, Advertisement)
        if advertisement.sender not in directory:
            raise RefusalError(f"keys of client {advertisement.sender}, which is not in the directory")
        require_signed_keys(directory[advertisement.sender], run, advertisement)
        return advertisement

    return read


class FrozenPeers(Message, frozen=True, tag="frozen-peers"):
    """The private key for channels, and the known lists of keys. Channels are derived from them."""

    channel: Key
    advertised: tuple[Advertisement, ...]


class Peers:
    """The newest list of keys of every known client, this one included."""

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
        """Take the lists of keys that come with an opening. Together with the known ones they must give every neighbour
        a distinct key; otherwise nothing is taken."""
        known = dict(self._advertised)
        for data in opening.advertisements:
            advertisement = self._read(data)
            sender = advertisement.sender
            if sender == self._number or sender not in opening.members:
                raise RefusalError(f"keys of client {sender}, which is no peer of this client in slot {opening.slot}")
            if sender in known and advertisement.first < known[sender].first:
                raise RefusalError(f"keys of client {sender} that are older than those known")
            known[sender] = advertisement
        keys = [own_key, *(_key(known, peer, opening.slot) for peer in neighbours)]
        if len(set(keys)) != len(keys):
            raise RefusalError(f"two clients have the same key in slot {opening.slot}")
        self._advertised = known

    def forget_keys_before(self, slot: int) -> None:
        """Forget lists that have run out: in a large federation a client meets new peers in every round."""
        self._advertised = {peer: a for peer, a in self._advertised.items() if a.first + len(a.keys) > slot}
        self._channels = {pair: key for pair, key in self._channels.items() if pair[0] in self._advertised}

    def key(self, peer: int, slot: int) -> bytes:
        """A client's public mask key for a slot."""
        return _key(self._advertised, peer, slot)

    def seal(self, slot: int, texts: Mapping[int, bytes]) -> bytes:
        """One box for each receiver, in order, which it alone can open, with the digests of its two shares."""
        own = self._key_context(self._number, slot)

        def box(receiver: int, text: bytes) -> bytes:
            key = expand(self._channel_to(receiver), box_context(own, self._number, receiver), "box")
            sealed = ChaCha20Poly1305(key).encrypt(NO_NONCE, text, None)
            return sealed + self._digests(slot, self._number, receiver, text)

        return b"".join(box(receiver, text) for receiver, text in texts.items())

    def open(self, slot: int, sender: int, box: bytes) -> bytes | None:
        """The content of a box. None if it was not sealed for this client and slot, or its digests do not match."""
        context = box_context(self._key_context(sender, slot), sender, self._number)
        key = expand(self._channel_to(sender), context, "box")
        sealed, digests = box[: -2 * DIGEST_BYTES], box[-2 * DIGEST_BYTES :]
        try:
            text = ChaCha20Poly1305(key).decrypt(NO_NONCE, sealed, None)
        except InvalidTag:
            return None
        return text if self._digests(slot, sender, self._number, text) == digests else None

    def _digests(self, slot: int, dealer: int, holder: int, text: bytes) -> bytes:
        first = share_digest(self._run, slot, dealer, holder, 0, text[:SHARE_BYTES])
        return first + share_digest(self._run, slot, dealer, holder, 1, text[SHARE_BYTES:])

    def _key_context(self, owner: int, slot: int) -> bytes:
        return key_context(self._run, _known(self._advertised, owner).session, owner, slot)

    def _channel_to(self, peer: int) -> bytes:
        pair = (peer, _known(self._advertised, peer).channel)
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
