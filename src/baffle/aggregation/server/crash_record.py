"""The crash record, which a server stores before it asks clients for shares.

After a crash the server must ask for the same sum again, because clients never help to unmask two.
"""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from baffle.aggregation.client_policy import ClientPolicy, checked_slot
from baffle.aggregation.messages import DIGEST_BYTES, Advertisement, Key, Members, Opening, Packed, cut
from baffle.aggregation.server.slot import ServerSlot
from baffle.core.messages import Hash, Message, Number, decode, encode
from baffle.core.ring import ELEMENT
from baffle.errors import MessageError, RunFolderError, unwritable
from baffle.files import Attempt, once, read_file, replace

MOST_BYTES = 1 << 34  # the largest crash record: the vectors of a thousand clients with four million weights each


@dataclass(frozen=True)
class CrashFile:
    """A crash record on disk, replaced whole or not at all, and durable when `write` returns. `attempt` makes every
    write, and may wait for room."""

    path: Path
    attempt: Attempt = once

    def write(self, record: bytes) -> None:
        def write() -> None:
            try:
                replace(self.path, record)
            except OSError as fault:
                raise unwritable(self.path, fault, "free some space") from None

        self.attempt(write)

    def clear(self) -> None:
        """Delete the record, because the round is now asked under another statement."""
        self.path.unlink(missing_ok=True)

    def read(self) -> bytes | None:
        try:
            return read_file(self.path, MOST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as fault:
            raise RunFolderError(f"{self.path} cannot be read: {fault.strerror or fault}") from None


class SlotRecord(Message, frozen=True, tag="kept-slot"):
    """One group's slot after its vectors have arrived. Of the participants' boxes, only the commitments and the digests
    of the shares are still needed."""

    opening: Opening
    participants: Members
    chain: Key
    context: Key
    senders: Members
    vectors: Packed
    commitments: Packed
    digests: tuple[bytes, ...]


class CrashRecord(Message, frozen=True, tag="kept"):
    """A round's slots; None for a group whose sum was already abandoned."""

    round: Number
    weights_hash: Hash
    slots: tuple[SlotRecord | None, ...]


def encode_record(record: CrashRecord) -> bytes:
    """The record's hash, then the record: a damaged vector would give a wrong sum."""
    data = encode(record)
    return sha256(data).digest() + data


def decode_record(data: bytes) -> CrashRecord:
    if sha256(data[32:]).digest() != data[:32]:
        raise MessageError("the crash record is damaged; the round must be asked for anew")
    return decode(data[32:], CrashRecord)


def record_slot(slot: ServerSlot) -> SlotRecord:
    opening = slot.slot.opening
    lists = tuple(encode(slot.advertisements[member]) for member in opening.members)
    whole = Opening(opening.slot, opening.members, opening.threshold, opening.floor, lists)
    vectors = b"".join(slot.vectors[client].astype(ELEMENT, copy=False).tobytes() for client in slot.alive)
    commitments = b"".join(slot.commitments[client] for client in slot.participants)
    digests = tuple(slot.digests[client] for client in slot.participants)
    return SlotRecord(whole, slot.participants, slot.chain, slot.context, slot.alive, vectors, commitments, digests)


def restore_slot(run: bytes, record: SlotRecord, policy: ClientPolicy) -> ServerSlot:
    """The slot as it was when it was recorded."""
    lists = [decode(data, Advertisement) for data in record.opening.advertisements]
    advertisements = {advertisement.sender: advertisement for advertisement in lists}
    members = record.opening.members
    if tuple(advertisements) != members or not set(record.senders) <= set(record.participants) <= set(members):
        raise MessageError("the crash record holds clients that are not members of its slot, or lacks some")
    slot = ServerSlot(run, checked_slot(record.opening, policy), advertisements, participants=record.participants)
    slot.chain, slot.context, slot.alive = record.chain, record.context, record.senders
    size = len(record.vectors)
    if not record.senders or size % (ELEMENT.itemsize * len(record.senders)):
        raise MessageError(f"the crash record holds {size} bytes of vectors for {len(record.senders)} clients")
    elements = np.frombuffer(record.vectors, dtype=ELEMENT)
    slot.vectors = dict(zip(record.senders, elements.reshape(len(record.senders), -1), strict=True))
    commitments = cut(record.commitments, 32, len(record.participants), "commitments")
    slot.commitments = dict(zip(record.participants, commitments, strict=True))
    size = 2 * DIGEST_BYTES * slot.slot.graph.k
    if [len(digests) for digests in record.digests] != [size] * len(record.participants):
        raise MessageError("the crash record holds digests of other shares than were dealt")
    slot.digests = dict(zip(record.participants, record.digests, strict=True))
    return slot
