"""The secure sums of a round: the server's side of every phase, over any transport. A steady round is two exchanges."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field

from baffle.aggregation.client_policy import ClientPolicy, Groups, checked_slot
from baffle.aggregation.messages import Agreed, Opening, Turn, Turned
from baffle.aggregation.server.advertised_keys import AdvertisedKeys
from baffle.aggregation.server.crash_record import (
    CrashRecord,
    CrashStore,
    decode_record,
    encode_record,
    record_slot,
    restore_slot,
)
from baffle.aggregation.server.group_sum import GroupSum, continue_each
from baffle.aggregation.server.slot import ServerSlot
from baffle.aggregation.server.traffic import Traffic
from baffle.core.messages import RoundRequest, contribution_to, decode_answer
from baffle.core.ports import Collected, Transport
from baffle.core.ring import EXTRAS, Encoding, Sum
from baffle.errors import AbortError, AbstainedError, MessageError, RefusalError


@dataclass
class SecureSum:
    """Learns for each group of a round the sum over the clients that finish it, and nothing else about any of them.

    The exchange that ends one round opens the next, so that clients do their key work while they wait anyway. With a
    `crash_store`, a server that crashes while it asks for shares asks for the same sum again. `reachable` says which
    clients can be asked at the moment; without it, all of them. A round is opened for no others: its threshold counts
    all that it was opened for, and would soon be out of reach of those that are here.

    A client that was proved to lie is left out for as long as this object lives: otherwise it could spoil every round,
    and clients answer only a few times about the same weights.
    """

    ring: Encoding
    length: int
    run: bytes
    directory: Mapping[int, bytes]
    policy: ClientPolicy
    crash_store: CrashStore | None = None
    reachable: Callable[[], Set[int]] | None = None
    _keys: AdvertisedKeys = field(init=False)
    _opened: list[ServerSlot] = field(default_factory=list)  # slots that the last round opened for the next

    def __post_init__(self) -> None:
        self._keys = AdvertisedKeys(self.run, self.directory)

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
        totals = tuple(by_group.get(index) for index in range(len(sums)))
        events = {
            client: event
            for group_sum in sums
            for client, event in group_sum.events(traffic, self._keys.barred).items()
        }
        states = {
            client: state for group_sum in sums if group_sum.slot for client, state in group_sum.slot.states.items()
        }
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
        opened = self._opened
        self._opened = []
        for slot in opened:
            slot.leave_out(self._keys.barred)  # they were caught after it had been opened
        for group_sum in sums:
            fitting = (slot for slot in opened if _fits(slot, group_sum))
            group_sum.slot = next(fitting, None)
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
        if len(slot.sealed) < max(self.policy.floor, slot.slot.opening.threshold):
            raise AbortError(
                f"{len(slot.sealed)} of {len(group_sum.requests)} clients shared their secrets, too few for a sum"
            )

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
        """Let the clients sign who survived, so that each can see that the others were told the same."""
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
        return self.ring.decode(slot.total(), len(slot.alive))

    def _bar_liars(self, sums: list[GroupSum], traffic: Traffic) -> None:
        for group_sum in sums:
            for client, how in group_sum.slot.lies.items() if group_sum.slot else ():
                traffic.refuse(client, RefusalError(how))
                self._keys.bar(client, how)

    def _open_slots(self, number: int, groups: Groups) -> list[ServerSlot | None]:
        """A slot for each group, or none for a group in which too few clients are reachable and have keys."""
        slots: list[ServerSlot | None] = []
        reachable = self.reachable() if self.reachable else set(self.directory)
        for group in groups:
            slot = None
            with suppress(RefusalError):
                slot = self._open_slot(number, [client for client in sorted(group) if client in reachable], len(group))
            slots.append(slot)
        return slots

    def _open_slot(self, number: int, clients: Sequence[int], company: int) -> ServerSlot:
        """A slot for those of the clients that have keys. `company` is the size of the whole group."""
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


def _fits(slot: ServerSlot, group_sum: GroupSum) -> bool:
    members = slot.slot.opening.members
    return set(members) <= set(group_sum.requests) and slot.slot.number == group_sum.round
