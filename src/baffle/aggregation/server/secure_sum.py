"""The secure sums of a round, over any transport: the server's side of the phases, two exchanges in steady state."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from baffle.aggregation.client_policy import ClientPolicy, Groups, checked_slot
from baffle.aggregation.context import require_signed_keys
from baffle.aggregation.masks import agree
from baffle.aggregation.messages import Advertisement, Agreed, Hello, Opening, Turn, Turned
from baffle.aggregation.server.crash_record import CrashRecord, Memory, pack, restore, to_keep, unpack
from baffle.aggregation.server.slot import ServerSlot
from baffle.aggregation.server.traffic import Traffic
from baffle.core.messages import RoundRequest, contribution_to, decode, encode
from baffle.core.ports import CONTRIBUTED, MISSING, Collected, Transport
from baffle.core.ring import EXTRAS, Ring, Sum
from baffle.errors import AbortError, MessageError, RefusalError

T = TypeVar("T")


@dataclass
class GroupSum:
    """One group's sum on its way: its requests, its slot once there is one, and why it was given up, if it was."""

    requests: Mapping[int, RoundRequest]
    slot: ServerSlot | None = None
    with_keys: Sequence[int] = ()
    fault: str = ""

    def open_slot(self) -> ServerSlot:
        if self.slot is None:
            raise AbortError(f"{len(self.with_keys)} of {len(self.requests)} clients have keys, too few for a sum")
        return self.slot

    def present(self) -> Iterable[int]:
        """Who has done its part so far."""
        if self.slot is None:
            return self.with_keys
        return self.slot.vectors if self.slot.participants else self.slot.sealed


@dataclass
class SecureSum:
    """Learns, for each group of a round, the sum over the clients that finish it, and nothing else about any of them.

    The exchange that ends one round opens the next, so that key work is done while clients wait anyway. With a
    `memory` a server that crashes while it asks for shares asks again for the same sum.
    """

    ring: Ring
    length: int
    run: bytes
    directory: Mapping[int, bytes]
    policy: ClientPolicy
    memory: Memory | None = None
    _advertised: dict[int, Advertisement] = field(default_factory=dict)
    _delivered: dict[int, dict[int, bytes]] = field(default_factory=dict)
    _next: list[ServerSlot] = field(default_factory=list)
    _anybody: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)

    def collect(self, groups: Sequence[Mapping[int, RoundRequest]], transport: Transport) -> Collected:
        traffic, sums = Traffic(transport), [GroupSum(requests) for requests in groups]
        if not self._restored(sums):
            self._ready(sums, traffic)
            self._take_vectors(sums, traffic)
            self._keep(sums)
        if self.policy.agreement:
            self._agree(sums, traffic)
        self._turn(sums, traffic)
        found = self._each(sums, self._total)
        events = {client: event for one in sums for client, event in _events(one, traffic).items()}
        totals = tuple(found.get(index) for index in range(len(sums)))
        return Collected(totals, events, dict(traffic.silent), traffic.refusals, traffic.up, traffic.down)

    def forget(self, client: int) -> None:
        """A client that may have been started anew is asked for keys again: its old ones are lost."""
        self._advertised.pop(client, None)

    def _ready(self, sums: list[GroupSum], traffic: Traffic) -> None:
        """The slots that the last round opened, or new ones."""
        opened, self._next = {slot.slot.opening.members: slot for slot in self._next}, []
        for one in sums:
            fits = (
                s for members, s in opened.items() if set(members) <= set(one.requests) and s.slot.number == _round(one)
            )
            one.slot = next(fits, None)
        lacking = [one for one in sums if one.slot is None]
        if lacking:
            number = _round(lacking[0])
            self._advertise(number, [client for one in lacking for client in one.requests], traffic)
            for one, slot in zip(lacking, self._open_all(number, [list(one.requests) for one in lacking]), strict=True):
                one.slot, one.with_keys = slot, [client for client in one.requests if client in self._advertised]
            slots = [one.slot for one in lacking if one.slot]
            turns = {client: Turn(None, opening) for client, opening in self._openings(slots).items()}
            self._take_turns(traffic.exchange(turns), [], slots, traffic)

        def require_enough(one: GroupSum) -> None:
            slot = one.open_slot()
            if len(slot.sealed) < max(self.policy.floor, slot.slot.opening.threshold):
                raise AbortError(
                    f"{len(slot.sealed)} of {len(one.requests)} clients shared their secrets, too few for a sum"
                )

        self._each(sums, require_enough)

    def _take_vectors(self, sums: list[GroupSum], traffic: Traffic) -> None:
        asked = self._each(sums, lambda one: one.open_slot().requests(one.requests))
        everybody = {client: request for requests in asked.values() for client, request in requests.items()}
        replies = traffic.exchange(everybody)
        for index, requests in asked.items():
            for client in requests.keys() & replies.keys():
                try:
                    vector = contribution_to(sums[index].requests[client], replies[client])
                    sums[index].open_slot().take_vector(client, vector, self.length + EXTRAS)
                except MessageError as fault:
                    traffic.refuse(client, fault)
        self._each(sums, lambda one: one.open_slot().survivors())

    def _agree(self, sums: list[GroupSum], traffic: Traffic) -> None:
        """Let the clients sign who survived, so that each can see that the others were told the same."""
        asked = self._each(sums, lambda one: one.open_slot().survivors())
        replies = traffic.exchange(
            {client: about for i, about in asked.items() for client in sums[i].open_slot().alive}
        )
        for index in asked:
            slot = sums[index].open_slot()
            for client in replies.keys() & set(slot.alive):
                try:
                    slot.take_agreed(client, decode(replies[client], Agreed), self.directory[client])
                except MessageError as fault:
                    traffic.refuse(client, fault)

    def _turn(self, sums: list[GroupSum], traffic: Traffic) -> None:
        """Unmask this round and, with the same messages, open the next."""
        unmask = self._each(sums, lambda one: one.open_slot().unmask())
        ending = [sums[index].open_slot() for index in unmask]
        if not ending:
            return
        asked = {client: unmask[index] for index in unmask for client in sums[index].open_slot().alive}
        number = _round(sums[0]) + 1
        upcoming = self.policy.groups_of(number) if self.policy.groups_of else ()
        self._advertise(number, [client for group in upcoming for client in group], traffic)
        self._next = [slot for slot in self._open_all(number, upcoming) if slot]
        openings = self._openings(self._next)
        turns = {client: Turn(asked.get(client), openings.get(client)) for client in sorted({*asked, *openings})}
        self._take_turns(traffic.exchange(turns), ending, self._next, traffic)

    def _total(self, one: GroupSum) -> Sum:
        slot = one.open_slot()
        return self.ring.decode(slot.total(), len(slot.alive))

    def _take_turns(
        self, replies: Mapping[int, bytes], ending: list[ServerSlot], opening: list[ServerSlot], traffic: Traffic
    ) -> None:
        ends = {client: slot for slot in ending for client in slot.alive}
        opens = {client: slot for slot in opening for client in slot.slot.opening.members}
        for client, data in replies.items():
            try:
                turned = decode(data, Turned)
                if turned.unmasked and client in ends:
                    ends[client].take_unmasked(client, turned.unmasked)
                if turned.sealed and client in opens:
                    slot = opens[client]
                    slot.take_sealed(client, turned.sealed)
                    self._delivered.setdefault(client, {}).update(
                        {peer: slot.advertisements[peer].signature for peer in slot.slot.graph.neighbours[client]}
                    )
                elif client in opens:
                    self._advertised.pop(client, None)  # it may have started anew, with other keys
                if turned.refusal:
                    raise RefusalError(turned.refusal)
            except MessageError as fault:
                traffic.refuse(client, fault)

    def _advertise(self, number: int, members: list[int], traffic: Traffic) -> None:
        """Ask those for keys of whom none are known for this slot."""
        for client in members:
            advertised = self._advertised.get(client)
            if advertised and number >= advertised.first + len(advertised.keys):
                del self._advertised[client]
        lacking = [client for client in members if client not in self._advertised]
        for client, data in traffic.exchange({client: Hello(number) for client in lacking}).items():
            try:
                advertisement = decode(data, Advertisement)
                if advertisement.sender != client or not 0 <= number - advertisement.first < len(advertisement.keys):
                    raise RefusalError(f"keys of client {advertisement.sender} from slot {advertisement.first} on")
                require_signed_keys(self.directory[client], self.run, advertisement)
                for key in (advertisement.channel, *advertisement.keys):
                    agree(self._anybody, key)  # a key that nobody can agree with would keep all its peers away
                self._advertised[client] = advertisement
                self._delivered.pop(client, None)
            except MessageError as fault:
                traffic.refuse(client, fault)

    def _open_all(self, number: int, groups: Groups) -> list[ServerSlot | None]:
        """A slot for each group; none where too few of it have keys."""
        made: list[ServerSlot | None] = []
        for group in groups:
            slot = None
            with suppress(RefusalError):
                slot = self._open(number, group)
            made.append(slot)
        return made

    def _open(self, number: int, group: Sequence[int]) -> ServerSlot:
        present = tuple(client for client in sorted(group) if client in self._advertised)
        seed = secrets.token_bytes(32)
        least = self.policy.least_threshold(self.policy.graph(present, seed), len(group))
        opening = Opening(number, present, self.policy.threshold or least, self.policy.floor, seed, ())
        lists = {client: self._advertised[client] for client in present}
        return ServerSlot(self.run, checked_slot(opening, self.policy), lists)

    def _openings(self, slots: Iterable[ServerSlot]) -> dict[int, Opening]:
        """For each member the opening, with the keys that it has not been sent yet."""
        made: dict[int, Opening] = {}
        for slot in slots:
            o, lists = slot.slot.opening, slot.advertisements
            for client in o.members:
                known = self._delivered.get(client, {})
                peers = slot.slot.graph.neighbours[client]
                new = tuple(encode(lists[peer]) for peer in peers if known.get(peer) != lists[peer].signature)
                made[client] = Opening(o.slot, o.members, o.threshold, o.floor, o.graph_seed, new)
        return made

    def _keep(self, sums: list[GroupSum]) -> None:
        if self.memory is None:
            return
        slots = tuple(to_keep(one.open_slot()) if not one.fault else None for one in sums)
        request = next(iter(sums[0].requests.values()))
        self.memory.keep(pack(CrashRecord(request.round, request.weights_hash, slots)))

    def _restored(self, sums: list[GroupSum]) -> bool:
        """Take up the round where a server that is no more has left it, if it had come so far as to ask for shares."""
        data = self.memory.kept() if self.memory else None
        if data is None:
            return False
        try:
            return self._restore(unpack(data), sums)
        except (
            MessageError
        ):  # damaged, or not of these terms: clients that have served the round refuse it, and it is skipped
            return False

    def _restore(self, kept: CrashRecord, sums: list[GroupSum]) -> bool:
        request = next(iter(sums[0].requests.values()))
        if (kept.round, kept.weights_hash, len(kept.slots)) != (request.round, request.weights_hash, len(sums)):
            return False
        slots = [restore(self.run, slot, self.policy) if slot else None for slot in kept.slots]
        for one, slot in zip(sums, slots, strict=True):
            one.slot, one.fault = slot, "" if slot else "the sum was given up before the server started anew"
        return True

    def _each(self, sums: list[GroupSum], act: Callable[[GroupSum], T]) -> dict[int, T]:
        """Go on with every group that has not been given up; one that fails does not keep the others back."""
        results: dict[int, T] = {}
        for index, one in enumerate(sums):
            if not one.fault:
                try:
                    results[index] = act(one)
                except MessageError as fault:
                    one.fault = f"the sum was abandoned: {fault}"
        return results


def _round(one: GroupSum) -> int:
    return next(iter(one.requests.values())).round


def _events(one: GroupSum, traffic: Traffic) -> dict[int, str]:
    """What became of each client of a group."""
    refused = dict(reversed(traffic.refusals))
    present = set(one.present())
    return {
        client: (one.fault or CONTRIBUTED) if client in present else refused.get(client, MISSING)
        for client in one.requests
    }
