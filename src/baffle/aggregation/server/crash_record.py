"""What a server writes down before it asks clients for shares.

After a crash it must ask for the same sum again: no client helps to unmask two.
"""

from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np

from baffle.aggregation.client_policy import ClientPolicy, checked_slot
from baffle.aggregation.messages import Advertisement, Key, Members, Opening, Packed
from baffle.aggregation.server.slot import ServerSlot
from baffle.core.messages import Hash, Message, Number, decode, encode
from baffle.core.ring import ELEMENT
from baffle.errors import MessageError, RunFolderError
from baffle.files import replace


class Memory(Protocol):
    """One record that outlives the process, durable when `keep` returns."""

    def keep(self, data: bytes) -> None: ...

    def kept(self) -> bytes | None: ...


class CrashFile:
    """A memory on disk, replaced whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self, data: bytes) -> None:
        try:
            replace(self._path, data)
        except OSError as fault:
            raise RunFolderError(
                f"{self._path} cannot be written: {fault.strerror or fault}; free some space"
            ) from None

    def kept(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as fault:
            raise RunFolderError(f"{self._path} cannot be read: {fault.strerror or fault}") from None


class SlotRecord(Message, frozen=True, tag="kept-slot"):
    """One group's slot whose vectors have come."""

    opening: Opening
    participants: Members
    context: Key
    senders: Members
    vectors: Packed


class CrashRecord(Message, frozen=True, tag="kept"):
    """A round's slots; none where the group had given up already."""

    round: Number
    weights_hash: Hash
    slots: tuple[SlotRecord | None, ...]


def pack(kept: CrashRecord) -> bytes:
    """The record as it is stored, behind its hash: a spoilt vector would give a wrong sum."""
    data = encode(kept)
    return sha256(data).digest() + data


def unpack(data: bytes) -> CrashRecord:
    if sha256(data[32:]).digest() != data[:32]:
        raise MessageError("what was kept of a sum is damaged; the round must be asked for anew")
    return decode(data[32:], CrashRecord)


def to_keep(slot: ServerSlot) -> SlotRecord:
    opening = slot.slot.opening
    lists = tuple(encode(slot.advertisements[member]) for member in opening.members)
    whole = Opening(opening.slot, opening.members, opening.threshold, opening.floor, opening.graph_seed, lists)
    vectors = b"".join(slot.vectors[client].astype(ELEMENT, copy=False).tobytes() for client in slot.alive)
    return SlotRecord(whole, slot.participants, slot.context, slot.alive, vectors)


def restore(run: bytes, kept: SlotRecord, policy: ClientPolicy) -> ServerSlot:
    """The slot as it was when it was kept."""
    lists = [decode(data, Advertisement) for data in kept.opening.advertisements]
    slot = ServerSlot(run, checked_slot(kept.opening, policy), {one.sender: one for one in lists})
    slot.participants, slot.context, slot.alive = kept.participants, kept.context, kept.senders
    rows = np.frombuffer(kept.vectors, dtype=ELEMENT)
    if not kept.senders or len(rows) % len(kept.senders):
        raise MessageError(f"{len(rows)} elements kept for {len(kept.senders)} clients")
    slot.vectors = dict(zip(kept.senders, rows.reshape(len(kept.senders), -1), strict=True))
    return slot
