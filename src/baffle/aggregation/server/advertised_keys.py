"""The signed keys that clients have advertised, and which of them each client has been sent."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baffle.aggregation.context import require_signed_keys
from baffle.aggregation.masks import is_low_order
from baffle.aggregation.messages import Advertisement, Hello
from baffle.aggregation.plain import Traffic
from baffle.aggregation.server.faults import Faults
from baffle.aggregation.server.slot import ServerSlot
from baffle.core.messages import decode_answer, encode
from baffle.errors import MessageError, RefusalError

FIELD = 2**255 - 19  # public keys are numbers below it


@dataclass
class AdvertisedKeys:
    """Every client's newest list of keys. `directory` holds the public identities that sign them. Clients that are left
    out for their `faults` are not asked for keys, and so belong to no slot.

    A key belongs to the client that advertised it first. It stays that client's when the list runs out or is forgotten,
    until the client advertises another list: a client that advertises its own key again must not count as a copier.
    """

    run: bytes
    directory: Mapping[int, bytes]
    faults: Faults = field(default_factory=Faults)
    _advertised: dict[int, Advertisement] = field(default_factory=dict)
    _delivered: dict[int, dict[int, bytes]] = field(default_factory=dict)  # client → peer → signature of its list
    _encoded: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # client → signature, the whole list
    _owners: dict[bytes, int] = field(default_factory=dict)  # key → client
    _owned: dict[int, tuple[bytes, ...]] = field(default_factory=dict)  # client → its keys

    def collect(self, slot: int, members: Sequence[int], traffic: Traffic) -> None:
        """Ask every member that has no key for this slot to advertise, except for those that are barred."""
        for client in members:
            advertised = self._advertised.get(client)
            if advertised and slot >= advertised.first + len(advertised.keys):
                del self._advertised[client]
        barred = self.faults.barred
        lacking = [client for client in members if client not in self._advertised and client not in barred]
        for client, data in traffic.exchange({client: Hello(slot) for client in lacking}).items():
            try:
                advertisement = self._checked(client, slot, decode_answer(data, Advertisement))
                self._own(client, (advertisement.channel, *advertisement.keys), slot)
                self._advertised[client] = advertisement
                self._delivered.pop(client, None)
            except MessageError as fault:
                traffic.refuse(client, fault)

    def of(self, clients: Iterable[int]) -> dict[int, Advertisement]:
        """The lists of those clients that have advertised, in the order of `clients`."""
        return {client: self._advertised[client] for client in clients if client in self._advertised}

    def forget(self, client: int) -> None:
        """Drop a client's list, so that it is asked for keys again."""
        self._advertised.pop(client, None)

    def bar(self, client: int, why: str) -> None:
        """Drop a client's list, and do not ask it for keys for a while."""
        self.faults.charge(client, why)
        self.forget(client)

    def undelivered(self, client: int, slot: ServerSlot) -> tuple[bytes, ...]:
        """The lists of a client's neighbours in a slot that it has not been sent yet."""
        known = self._delivered.get(client, {})
        lists = slot.advertisements
        neighbours = slot.slot.graph.neighbours[client]
        return tuple(self._encode(lists[peer]) for peer in neighbours if known.get(peer) != lists[peer].signature)

    def note_delivered(self, client: int, slot: ServerSlot) -> None:
        """A client that has sealed its shares for a slot has the keys of all its neighbours there."""
        signatures = {peer: slot.advertisements[peer].signature for peer in slot.slot.graph.neighbours[client]}
        self._delivered.setdefault(client, {}).update(signatures)

    def _encode(self, advertisement: Advertisement) -> bytes:
        """A list as it is sent. Each list is encoded once and sent to many clients."""
        known = self._encoded.get(advertisement.sender)
        if known is None or known[0] != advertisement.signature:
            known = self._encoded[advertisement.sender] = advertisement.signature, encode(advertisement)
        return known[1]

    def _checked(self, client: int, slot: int, advertisement: Advertisement) -> Advertisement:
        if advertisement.sender != client or not 0 <= slot - advertisement.first < len(advertisement.keys):
            raise RefusalError(f"keys of client {advertisement.sender} from slot {advertisement.first} on")
        require_signed_keys(self.directory[client], self.run, advertisement)
        keys = (advertisement.channel, *advertisement.keys)
        if any(map(is_low_order, keys)):  # all its peers would refuse the slot
            raise RefusalError(f"client {client} advertises a public key that nobody can agree with")
        if len(set(keys)) != len(keys):
            raise RefusalError(f"client {client} advertises a key twice")
        if any(int.from_bytes(key, "little") >= FIELD for key in keys):  # the same key could be written in two ways
            raise RefusalError(f"client {client} advertises a key that is not written as X25519 writes it")
        return advertisement

    def _own(self, client: int, keys: tuple[bytes, ...], slot: int) -> None:
        """Make a client the owner of these keys, in place of those that it had. Refuses keys that another client owns.
        The later client is the copier if it has advertised before, because clients learn each other's keys only as
        members of a slot. Its first list proves nothing: a copier may know it from before a restart of the server."""
        others = {self._owners[key] for key in keys if key in self._owners} - {client}
        if others:
            if client in self._owned:
                self.bar(client, f"before round {slot} it advertised a key of client {min(others)} as its own")
            raise RefusalError(f"client {client} advertises a key that client {min(others)} advertised before")
        for key in self._owned.get(client, ()):
            del self._owners[key]
        self._owned[client] = keys
        self._owners.update(dict.fromkeys(keys, client))
