"""The secure sum of a round, over any transport: the server's side of the phases, two exchanges in steady state."""

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from baffle.core.messages import RoundRequest, contribution_to, decode, encode
from baffle.core.ports import CONTRIBUTED, MISSING, Collected, Transport
from baffle.core.ring import EXTRAS, Ring
from baffle.errors import AbortError, MessageError, RefusalError
from baffle.secure.context import checked_slot, require_signature
from baffle.secure.graph import graph
from baffle.secure.masks import agree
from baffle.secure.messages import Advertisement, Hello, Opening, Turn, Turned
from baffle.secure.session import ServerSlot
from baffle.secure.traffic import Traffic

Roster = Callable[[int], list[int]]
"""Round → the clients that were chosen for it; empty where there is no such round."""


@dataclass
class SecureSum:
    """Learns the sum over the clients that finish a round, and nothing else about any of them.

    The exchange that ends one round opens the next, so that key work is done while clients wait anyway.
    """

    ring: Ring
    length: int
    run: bytes
    directory: Mapping[int, bytes]
    roster_of: Roster
    floor: int
    threshold: int = 0  # 0: the least safe one
    _advertised: dict[int, Advertisement] = field(default_factory=dict)
    _delivered: dict[int, dict[int, bytes]] = field(default_factory=dict)
    _next: ServerSlot | None = None
    _anybody: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)

    def collect(self, requests: Mapping[int, RoundRequest], transport: Transport) -> Collected:
        request = next(iter(requests.values()))
        traffic = Traffic(transport)
        events: dict[int, str] = {}
        try:
            slot = self._ready(request.key, sorted(requests), traffic)
            events |= dict.fromkeys(requests, MISSING)
            self._take_vectors(slot, requests, traffic, events)
            self._turn(slot, request, traffic, events)
            total = slot.total(request)
            found = self.ring.decode(total, len(slot.alive))
        except MessageError as fault:
            why = f"the sum was abandoned: {fault}"
            known = {client: CONTRIBUTED if client in traffic.answered else MISSING for client in requests} | events
            events = {client: why if event == CONTRIBUTED else event for client, event in known.items()}
            return Collected(None, events, traffic.up, traffic.down)
        return Collected(found, events, traffic.up, traffic.down)

    def _ready(self, number: int, members: list[int], traffic: Traffic) -> ServerSlot:
        """The slot that the last round opened, or one opened now."""
        slot, self._next = self._next, None
        if slot is None or slot.slot.number != number or not set(slot.slot.opening.members) <= set(members):
            self._advertise(number, members, traffic)
            slot = self._open(number, members)
            turns = {client: Turn(None, opening) for client, opening in self._openings(slot).items()}
            self._take_turns(traffic.exchange(turns), None, slot, {})
        if len(slot.sealed) < max(self.floor, slot.slot.opening.threshold):
            raise AbortError(f"{len(slot.sealed)} of {len(members)} clients shared their secrets, too few for a sum")
        return slot

    def _take_vectors(
        self, slot: ServerSlot, requests: Mapping[int, RoundRequest], traffic: Traffic, events: dict[int, str]
    ) -> None:
        for client, data in traffic.exchange(slot.requests(requests)).items():
            try:
                slot.take_vector(client, contribution_to(requests[client], data), self.length + EXTRAS)
                events[client] = CONTRIBUTED
            except MessageError as fault:
                events[client] = str(fault)

    def _turn(self, slot: ServerSlot, request: RoundRequest, traffic: Traffic, events: dict[int, str]) -> None:
        """Unmask this round and, with the same messages, open the next."""
        unmask = slot.survivors()
        upcoming = sorted(self.roster_of(request.round + 1))
        openings: dict[int, Opening] = {}
        if upcoming:
            self._advertise(request.key + 1, upcoming, traffic)
            with suppress(RefusalError):  # too few have keys: the next round will ask again
                self._next = self._open(request.key + 1, upcoming)
                openings = self._openings(self._next)
        turns = {
            client: Turn(unmask if client in slot.vectors else None, openings.get(client))
            for client in sorted({*slot.alive, *openings})
        }
        self._take_turns(traffic.exchange(turns), slot, self._next, events)

    def _take_turns(
        self,
        replies: Mapping[int, bytes],
        ending: ServerSlot | None,
        opening: ServerSlot | None,
        events: dict[int, str],
    ) -> None:
        for client, data in replies.items():
            try:
                turned = decode(data, Turned)
                if turned.unmasked and ending:
                    ending.take_unmasked(client, turned.unmasked)
                if turned.sealed and opening:
                    opening.take_sealed(client, turned.sealed)
                    self._delivered.setdefault(client, {}).update(
                        {peer: opening.advertisements[peer].signature for peer in opening.slot.graph.neighbours[client]}
                    )
                elif opening and client in opening.slot.graph.neighbours:
                    self._advertised.pop(client, None)  # it may have started anew, with other keys
                if turned.refusal:
                    raise RefusalError(turned.refusal)
            except MessageError as fault:
                if events.get(client) == MISSING:
                    events[client] = str(fault)

    def _advertise(self, number: int, members: list[int], traffic: Traffic) -> None:
        """Ask those for keys of whom none are known for this slot."""
        for client in members:
            advertised = self._advertised.get(client)
            if advertised and number >= advertised.first + len(advertised.keys):
                del self._advertised[client]
        lacking = [client for client in members if client not in self._advertised]
        for client, data in (traffic.exchange({c: Hello(number) for c in lacking}) if lacking else {}).items():
            try:
                advertisement = decode(data, Advertisement)
                if advertisement.sender != client or not 0 <= number - advertisement.first < len(advertisement.keys):
                    raise RefusalError(f"keys of client {advertisement.sender} from slot {advertisement.first} on")
                require_signature(self.directory[client], self.run, advertisement)
                for key in (advertisement.channel, *advertisement.keys):
                    agree(self._anybody, key)  # a key that nobody can agree with would keep all its peers away
                self._advertised[client] = advertisement
                self._delivered.pop(client, None)
            except MessageError:
                continue

    def _open(self, number: int, members: list[int]) -> ServerSlot:
        present = tuple(client for client in members if client in self._advertised)
        seed = secrets.token_bytes(32)
        threshold = self.threshold or graph(present, seed).least_threshold
        opening = Opening(number, present, threshold, self.floor, seed, ())
        return ServerSlot(self.run, checked_slot(opening, self.floor), dict(self._advertised))

    def _openings(self, slot: ServerSlot) -> dict[int, Opening]:
        """For each member the opening, with the keys that it has not been sent yet."""
        opening, made = slot.slot.opening, {}
        for client in opening.members:
            known = self._delivered.get(client, {})
            new = tuple(
                encode(slot.advertisements[peer])
                for peer in slot.slot.graph.neighbours[client]
                if known.get(peer) != slot.advertisements[peer].signature
            )
            made[client] = Opening(
                opening.slot, opening.members, opening.threshold, opening.floor, opening.graph_seed, new
            )
        return made
