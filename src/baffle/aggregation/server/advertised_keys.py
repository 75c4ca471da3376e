"""The signed keys that clients have advertised, and which of them each client has been sent."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baffle.aggregation.context import require_signed_keys
from baffle.aggregation.masks import is_low_order
from baffle.aggregation.messages import Advertisement, Hello
from baffle.aggregation.server.slot import ServerSlot
from baffle.aggregation.server.traffic import Traffic
from baffle.core.messages import decode_answer, encode
from baffle.errors import MessageError, RefusalError


@dataclass
class AdvertisedKeys:
    """Every client's newest list of keys. `directory` holds the public identities that sign them."""

    run: bytes
    directory: Mapping[int, bytes]
    _advertised: dict[int, Advertisement] = field(default_factory=dict)
    _delivered: dict[int, dict[int, bytes]] = field(default_factory=dict)  # client → peer → signature of its list
    _encoded: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # client → signature, the whole list

    def collect(self, slot: int, members: Sequence[int], traffic: Traffic) -> None:
        """Ask every member that has no key for this slot to advertise."""
        for client in members:
            advertised = self._advertised.get(client)
            if advertised and slot >= advertised.first + len(advertised.keys):
                del self._advertised[client]
        lacking = [client for client in members if client not in self._advertised]
        for client, data in traffic.exchange({client: Hello(slot) for client in lacking}).items():
            try:
                self._advertised[client] = self._checked(client, slot, decode_answer(data, Advertisement))
                self._delivered.pop(client, None)
            except MessageError as fault:
                traffic.refuse(client, fault)

    def of(self, clients: Iterable[int]) -> dict[int, Advertisement]:
        """The lists of those clients that have advertised, in the order of `clients`."""
        return {client: self._advertised[client] for client in clients if client in self._advertised}

    def forget(self, client: int) -> None:
        """Drop a client's list, so that it is asked for keys again."""
        self._advertised.pop(client, None)

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
        """A list as it is sent; every list is encoded once and sent to many."""
        known = self._encoded.get(advertisement.sender)
        if known is None or known[0] != advertisement.signature:
            known = self._encoded[advertisement.sender] = advertisement.signature, encode(advertisement)
        return known[1]

    def _checked(self, client: int, slot: int, advertisement: Advertisement) -> Advertisement:
        if advertisement.sender != client or not 0 <= slot - advertisement.first < len(advertisement.keys):
            raise RefusalError(f"keys of client {advertisement.sender} from slot {advertisement.first} on")
        require_signed_keys(self.directory[client], self.run, advertisement)
        if any(map(is_low_order, (advertisement.channel, *advertisement.keys))):  # all its peers would refuse the slot
            raise RefusalError(f"client {client} advertises a public key that nobody can agree with")
        return advertisement
