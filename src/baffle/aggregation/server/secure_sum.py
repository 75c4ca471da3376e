"""The server's side of the secure sums of a round, over any transport. A steady round takes two exchanges."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from baffle.aggregation.client_policy import ClientPolicy, Groups, checked_slot
from baffle.aggregation.messages import Agreed, Opening, Turn, Turned
from baffle.aggregation.plain import Traffic
from baffle.aggregation.server.advertised_keys import AdvertisedKeys
from baffle.aggregation.server.crash_record import (
    CrashFile,
    CrashRecord,
    decode_record,
    encode_record,
    record_slot,
    restore_slot,
)
from baffle.aggregation.server.faults import Faults
from baffle.aggregation.server.slot import ServerSlot
from baffle.core.messages import RoundRequest, contribution_to, decode_answer
from baffle.core.ports import CONTRIBUTED, MISSING, Collected, Transport
from baffle.core.ring import EXTRAS, Encoding, Sum
from baffle.errors import AbortError, AbstainedError, MessageError, RefusalError

T = TypeVar("T")


@dataclass
class GroupSum:
    """The group's requests, its slot once one is open, and the reason if its sum was abandoned."""

    requests: Mapping[int, RoundRequest]
    slot: ServerSlot | None = None
    with_keys: Sequence[int] = ()
    fault: str = ""

    @property
    def request(self) -> RoundRequest:
        """One of the requests. All are about the same round and weights."""
        return next(iter(self.requests.values()))

    @property
    def round(self) -> int:
        return self.request.round

    def open_slot(self) -> ServerSlot:
        if self.slot is None:
            raise AbortError(f"{len(self.with_keys)} of {len(self.requests)} clients have keys, too few for a sum")
        return self.slot

    def present(self) -> Iterable[int]:
        """The clients that have done their part so far."""
        if self.slot is None:
            return self.with_keys
        return self.slot.vectors if self.slot.participants else self.slot.sealed

    def events(self, traffic: Traffic, barred: Mapping[int, str]) -> dict[int, str]:
        """How each client ended the round. `barred` maps clients that are not asked at all to the reason."""
        first_refusals = dict(reversed(traffic.refusals))
        reasons = first_refusals | {client: f"left out: {why}" for client, why in barred.items()}
        present = set(self.present())
        return {
            client: (self.fault or CONTRIBUTED) if client in present else reasons.get(client, MISSING)
            for client in self.requests
        }


def continue_each(sums: list[GroupSum], step: Callable[[GroupSum], T]) -> dict[int, T]:
    """Take one step with every group that has not been abandoned, and return the results by the group's index. A group
    whose step fails is abandoned; the others go on."""
    results: dict[int, T] = {}
    for index, group_sum in enumerate(sums):
        if not group_sum.fault:
            try:
                results[index] = step(group_sum)
            except MessageError as fault:
                group_sum.fault = f"the sum was abandoned: {fault}"
    return results


@dataclass
class SecureSum:
    """Learns for each group of a round the sum over the clients that finish it, and nothing else about any of them.

    The exchange that ends one round opens the next, so that clients prepare keys while they would otherwise wait. With
    a `crash_store`, a server that crashes while it asks for shares asks for the same sum again. `reachable` returns the
    clients that can be asked now; without it, all can. Rounds are opened for reachable clients only, because the
    threshold counts every client that a round was opened for.

    A client that has lied is left out for a while, as `faults` says. Otherwise it could spoil every round, and clients
    answer only a few times about the same weights.
    """

    ring: Encoding
    length: int
    run: bytes
    directory: Mapping[int, bytes]
    policy: ClientPolicy
    crash_store: CrashFile | None = None
    reachable: Callable[[], Set[int]] | None = None
    faults: Faults = field(default_factory=Faults)
    _keys: AdvertisedKeys = field(init=False)
    _opened: list[ServerSlot] = field(default_factory=list)  # slots that the last round opened for the next

    def __post_init__(self) -> None:
        self._keys = AdvertisedKeys(self.run, self.directory, self.faults)

    def collect(self, groups: Sequence[Mapping[int, RoundRequest]], transport: Transport) -> Collected:
        traffic = Traffic(transport)
        sums = [GroupSum(requests) for requests in groups]
        if not self._resumed(sums):
            self._give_slots(sums, traffic)
            self._take_vectors(sums, traffic)
            self._write_crash_record(sums)
        if self.policy.agreement:
            self._agree(sums, traffic)
        self._unmask_and_open_next(sums, traffic)
        by_group = continue_each(sums, self._total)
        self._bar_liars(sums, traffic)
        self._count_wasted(sums, by_group)
        events, states = dict[int, str](), dict[int, bytes]()
        for group_sum in sums:
            events |= group_sum.events(traffic, self.faults.barred)
            states |= group_sum.slot.states if group_sum.slot else {}
        totals = tuple(by_group.get(index) for index in range(len(sums)))
        return traffic.collected(totals, events)._replace(states=states)

    def forget(self, client: int) -> None:
        """Ask a client for keys again: if it was restarted, it has lost the old ones."""
        self._keys.forget(client)

    def _resumed(self, sums: list[GroupSum]) -> bool:
        """Restore the slots of this round from the crash record. False if there is none for this round."""
        data = self.crash_store.read() if self.crash_store else None
        if data is None:
            return False
        try:
            return self._restore(decode_record(data), sums)
        except MessageError:
            # Damaged, or written under another policy. Clients that have served the round refuse it, and it is skipped.
            return False

    def _restore(self, record: CrashRecord, sums: list[GroupSum]) -> bool:
        request = sums[0].request
        if (record.round, record.weights_hash, len(record.slots)) != (request.round, request.weights_hash, len(sums)):
            return False
        slots = [restore_slot(self.run, slot, self.policy) if slot else None for slot in record.slots]
        for group_sum, slot in zip(sums, slots, strict=True):
            group_sum.slot = slot
            group_sum.fault = "" if slot else "the sum was abandoned before the server restarted"
        return True

    def _give_slots(self, sums: list[GroupSum], traffic: Traffic) -> None:
        """Give each group the slot that the last round opened for it, or open a new one."""
        opened, self._opened = self._opened, []
        for slot in opened:
            slot.leave_out(self.faults.barred)  # they were caught after it had been opened
        for group_sum in sums:
            own = (slot for slot in opened if set(slot.slot.opening.members) <= set(group_sum.requests))
            group_sum.slot = next((slot for slot in own if slot.slot.number == group_sum.round), None)
        without_slot = [group_sum for group_sum in sums if group_sum.slot is None]
        if without_slot:
            self._open_now(without_slot, traffic)
        continue_each(sums, self._require_enough_sealed)

    def _open_now(self, sums: list[GroupSum], traffic: Traffic) -> None:
        number = sums[0].round
        self._keys.collect(number, [client for group_sum in sums for client in group_sum.requests], traffic)
        new_slots = self._open_slots(number, [list(group_sum.requests) for group_sum in sums])
        for group_sum, new_slot in zip(sums, new_slots, strict=True):
            group_sum.slot = new_slot
            group_sum.with_keys = list(self._keys.of(group_sum.requests))
        slots = [slot for slot in new_slots if slot]
        turns = {client: Turn(None, opening) for client, opening in self._openings(slots).items()}
        self._take_turns(traffic.exchange(turns), [], slots, traffic)

    def _require_enough_sealed(self, group_sum: GroupSum) -> None:
        slot = group_sum.open_slot()
        sealed, of = len(slot.sealed), len(group_sum.requests)
        if sealed < max(self.policy.floor, slot.slot.opening.threshold):
            raise AbortError(f"{sealed} of {of} clients shared their secrets, too few for a sum")

    def _take_vectors(self, sums: list[GroupSum], traffic: Traffic) -> None:
        requests_by_group = continue_each(sums, lambda group_sum: group_sum.open_slot().requests(group_sum.requests))
        replies = traffic.exchange(
            {client: request for requests in requests_by_group.values() for client, request in requests.items()}
        )
        for index, requests in requests_by_group.items():
            group_sum = sums[index]
            for client in requests.keys() & replies.keys():
                try:
                    vector = contribution_to(group_sum.requests[client], replies[client])
                    group_sum.open_slot().take_vector(client, vector, self.length + EXTRAS)
                except MessageError as fault:
                    traffic.refuse(client, fault)
        continue_each(sums, lambda group_sum: group_sum.open_slot().survivors())

    def _write_crash_record(self, sums: list[GroupSum]) -> None:
        if self.crash_store is None:
            return
        slots = tuple(record_slot(group_sum.open_slot()) if not group_sum.fault else None for group_sum in sums)
        request = sums[0].request
        record = CrashRecord(request.round, request.weights_hash, slots)
        self.crash_store.write(encode_record(record))

    def _agree(self, sums: list[GroupSum], traffic: Traffic) -> None:
        """Let the clients sign the survivors, so that each can see that all were sent the same list."""
        survivors = continue_each(sums, lambda group_sum: group_sum.open_slot().survivors())
        replies = traffic.exchange(
            {client: agree for index, agree in survivors.items() for client in sums[index].open_slot().alive}
        )
        for index in survivors:
            slot = sums[index].open_slot()
            for client in replies.keys() & set(slot.alive):
                try:
                    slot.take_agreed(client, decode_answer(replies[client], Agreed), self.directory[client])
                except MessageError as fault:
                    traffic.refuse(client, fault)

    def _unmask_and_open_next(self, sums: list[GroupSum], traffic: Traffic) -> None:
        """Unmask this round and, with the same messages, open the next."""
        unmask_by_group = continue_each(sums, lambda group_sum: group_sum.open_slot().unmask())
        ending = [sums[index].open_slot() for index in unmask_by_group]
        if not ending:
            return
        unmasks = {
            client: unmask for index, unmask in unmask_by_group.items() for client in sums[index].open_slot().alive
        }
        number = sums[0].round + 1
        upcoming = self.policy.groups_of(number) if self.policy.groups_of else ()
        self._keys.collect(number, [client for group in upcoming for client in group], traffic)
        self._opened = [slot for slot in self._open_slots(number, upcoming) if slot]
        openings = self._openings(self._opened)
        turns = {client: Turn(unmasks.get(client), openings.get(client)) for client in sorted({*unmasks, *openings})}
        self._take_turns(traffic.exchange(turns), ending, self._opened, traffic)

    def _total(self, group_sum: GroupSum) -> Sum:
        slot = group_sum.open_slot()
        total = slot.total()
        try:
            return self.ring.decode(total, len(slot.alive))
        except MessageError:
            self.faults.note_spoilt(slot.alive)
            raise

    def _bar_liars(self, sums: list[GroupSum], traffic: Traffic) -> None:
        for group_sum in sums:
            for client, how in group_sum.slot.lies.items() if group_sum.slot else ():
                traffic.refuse(client, RefusalError(how))
                self._keys.bar(client, how)
        for client, how in self.faults.cornered().items():
            traffic.refuse(client, RefusalError(how))
            self._keys.bar(client, how)

    def _count_wasted(self, sums: list[GroupSum], by_group: Mapping[int, Sum]) -> None:
        """Count a round in which clients have released shares, which they do a few times only: has it led to a sum?"""
        slots = [group_sum.slot for group_sum in sums if group_sum.slot]
        if by_group:
            self.faults.wasted = 0
        elif any(len(slot.released) >= slot.slot.opening.threshold for slot in slots):
            self.faults.wasted += 1

    def _open_slots(self, number: int, groups: Groups) -> list[ServerSlot | None]:
        """A slot for each group, or none for a group in which too few clients are reachable and have keys."""
        slots: list[ServerSlot | None] = [None] * len(groups)
        reachable = self.reachable() if self.reachable else set(self.directory)
        for index, group in enumerate(groups):
            with suppress(RefusalError):
                clients = [client for client in sorted(group) if client in reachable]
                slots[index] = self._open_slot(number, clients, len(group))
        return slots

    def _open_slot(self, number: int, clients: Sequence[int], company: int) -> ServerSlot:
        """A slot for the clients that have keys. `company` is the size of the whole group."""
        advertisements = self._keys.of(clients)
        members = tuple(advertisements)
        least = self.policy.least_threshold(self.policy.graph(members, number), company)
        opening = Opening(number, members, self.policy.threshold or least, self.policy.floor, ())
        return ServerSlot(self.run, checked_slot(opening, self.policy), advertisements)

    def _openings(self, slots: Iterable[ServerSlot]) -> dict[int, Opening]:
        """The opening for each member, with the keys that it has not been sent yet."""
        openings: dict[int, Opening] = {}
        for slot in slots:
            o = slot.slot.opening
            for client in o.members:
                keys = self._keys.undelivered(client, slot)
                openings[client] = Opening(o.slot, o.members, o.threshold, o.floor, keys)
        return openings

    def _take_turns(
        self, replies: Mapping[int, bytes], ending: list[ServerSlot], opening: list[ServerSlot], traffic: Traffic
    ) -> None:
        """Take the clients' shares for the slots that end, and their sealed shares for those that open."""
        ends = {client: slot for slot in ending for client in slot.alive}
        opens = {client: slot for slot in opening for client in slot.slot.opening.members}
        for client, data in replies.items():
            try:
                turned = decode_answer(data, Turned)
                if turned.unmasked and client in ends:
                    ends[client].take_unmasked(client, turned.unmasked)
                if turned.sealed and client in opens:
                    opens[client].take_sealed(client, turned.sealed)
                    self._keys.note_delivered(client, opens[client])
                elif client in opens:
                    self._keys.forget(client)  # if it was restarted, it has lost these keys
                if (client in ends and not turned.unmasked) or (client in opens and not turned.sealed):
                    raise AbstainedError
            except MessageError as fault:
                traffic.refuse(client, fault)
