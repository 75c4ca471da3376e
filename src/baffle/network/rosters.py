"""Rosters: who belongs to a federation. The authority signs them and numbers them, and a later one takes the place of
an earlier one.

A roster can be believed whoever hands it over, because nobody but the authority can sign one. What a server or a client
must see to is that it never goes back to a lower number: `newer_roster` takes none, and `keep_roster` makes a later one
durable before anything builds on it.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec

from baffle.aggregation.context import length_prefixed, signed
from baffle.errors import KeysError
from baffle.files import replace, sync_folder
from baffle.network.key_files import only_line, read

MOST_CLIENTS = 100_000
MOST_NODE_KEY_LETTERS = 300
MOST_ROSTER_BYTES = 1_000 + MOST_CLIENTS * (MOST_NODE_KEY_LETTERS + 200)
LAST_NUMBER = 2**53

ROSTER = "roster.json"
"""The roster's file in every folder of keys."""

HANDED_OVER = "the new roster"
"""How messages call a roster that somebody handed over."""

PublicKey = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Signature = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{128}\Z")]
Moment = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z\Z")]


class Participant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A client's public keys: its identity as 64 hexadecimal digits, its node key in OpenSSH's format."""

    identity: PublicKey
    node: Annotated[str, msgspec.Meta(max_length=MOST_NODE_KEY_LETTERS)]


class Roster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The server, and all clients that may take part.

    A client's number is its place in `clients`, and never changes. A place whose client was revoked is empty (None)
    until another client gets it. A later roster of the same federation has a higher number. `signature` is the
    authority's, and empty until `authority.sign_roster` has signed.
    """

    number: Annotated[int, msgspec.Meta(ge=1, le=LAST_NUMBER)]
    expires: Moment
    server: PublicKey
    clients: Annotated[tuple[Participant | None, ...], msgspec.Meta(min_length=1, max_length=MOST_CLIENTS)]
    signature: Signature

    @property
    def server_key(self) -> bytes:
        """The server's public identity."""
        return bytes.fromhex(self.server)

    @property
    def expiry(self) -> datetime:
        return datetime.fromisoformat(self.expires)

    def participants(self) -> dict[int, Participant]:
        """Client number → public keys, without empty places."""
        return {number: client for number, client in enumerate(self.clients) if client is not None}

    def directory(self) -> dict[int, bytes]:
        """Client number → public identity, without empty places."""
        return {number: bytes.fromhex(client.identity) for number, client in self.participants().items()}

    def number_of(self, public: bytes) -> int | None:
        """The number of the client with this public identity."""
        wanted = public.hex()
        return next((number for number, client in self.participants().items() if client.identity == wanted), None)

    def signed_text(self) -> bytes:
        """What the authority signs: every field but the signature. An empty place is two empty fields, which no client
        is: an identity has 32 bytes."""
        head = (str(self.number).encode(), self.expires.encode(), self.server_key)
        clients = (
            key
            for client in self.clients
            for key in ((bytes.fromhex(client.identity), client.node.encode()) if client else (b"", b""))
        )
        return b"baffle/roster/2" + length_prefixed(*head, *clients)

    def has_expired(self) -> bool:
        return now() >= self.expiry

    def hash(self) -> bytes:
        """One hash for everything that the authority signed."""
        return sha256(self.signed_text()).digest()

    def encode(self) -> bytes:
        """The roster as its file holds it."""
        return msgspec.json.encode(self)


class _RosterOfVersion1(msgspec.Struct, forbid_unknown_fields=True):
    clients: tuple[Participant, ...]


def load_roster(folder: Path) -> Roster:
    """The roster in a folder, if the authority whose key lies beside it signed it and it has not expired."""
    roster = read_roster(folder)
    require_not_expired(str(folder / ROSTER), roster)
    return roster


def read_roster(folder: Path) -> Roster:
    """The roster in a folder, if the authority whose key lies beside it signed it. It may have expired."""
    place, data = str(folder / ROSTER), read(folder / ROSTER, MOST_ROSTER_BYTES)
    roster = _decoded(place, data)
    _require_sound(place, data, roster, load_authority(folder))
    return roster


def load_authority(folder: Path) -> bytes:
    """The public key of the authority that signs the rosters of a folder."""
    path = folder / "authority.pub"
    return bytes.fromhex(only_line(path, read(path), rb"[0-9a-f]{64}", "a public key: expected 64 hexadecimal digits"))


def newer_roster(known: Roster, authority: bytes, data: bytes) -> Roster:
    """A roster that anybody may have handed over, to be taken in place of `known`. It is refused unless the authority
    signed it, it has not expired, its number is higher, and clients in both have the same numbers in both. `known`
    itself may be handed over again."""
    if len(data) > MOST_ROSTER_BYTES:
        raise KeysError(f"{HANDED_OVER} has {len(data):,} bytes, expected at most {MOST_ROSTER_BYTES:,}")
    roster = _decoded(HANDED_OVER, data)
    _require_sound(HANDED_OVER, data, roster, authority)
    if roster.number < known.number or (roster.number == known.number and roster != known):
        raise KeysError(
            f"{HANDED_OVER} has number {roster.number}, but roster {known.number} is known here already; expected a "
            "higher number"
        )
    require_not_expired(HANDED_OVER, roster)
    numbers = {client.identity: number for number, client in known.participants().items()}
    for number, client in roster.participants().items():
        if (before := numbers.get(client.identity, number)) != number:
            raise KeysError(f"{HANDED_OVER} makes client {before} client {number}, but a client keeps its number")
    return roster


def keep_roster(folder: Path, roster: Roster) -> None:
    """Replace the roster in a folder of keys. It is durable on return, and a reader finds the old one or the new one,
    whole."""
    path = folder / ROSTER
    try:
        replace(path, roster.encode())
        sync_folder(folder)
    except OSError as fault:
        raise KeysError(
            f"{path} cannot be written: {fault.strerror or fault}; its process must be able to write to its folder of "
            "keys"
        ) from None


Reread = Callable[[], Roster | None]
"""A later roster, if there is one. Raises a KeysError, once, if there is one that cannot be used."""


class RosterFile:
    """The roster of a folder while a process runs: `reread` tells whether somebody has replaced it by a later one."""

    def __init__(self, folder: Path, authority: bytes, known: Roster) -> None:
        self._path, self._authority, self._known = folder / ROSTER, authority, known
        self._seen: tuple[int, ...] = ()

    def reread(self) -> Roster | None:
        """The later roster in the file; None as long as there is none. It costs little while the file stays as it is.
        A file that cannot be used is a KeysError once, until it is replaced again."""
        seen = self._stat()
        if seen == self._seen:
            return None
        self._seen = seen
        roster = newer_roster(self._known, self._authority, read(self._path, MOST_ROSTER_BYTES))
        if roster == self._known:
            return None
        self._known = roster
        return roster

    def _stat(self) -> tuple[int, ...]:
        """What differs once the file was replaced; empty if it is not there."""
        try:
            about = self._path.stat()
        except OSError:
            return ()
        return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def _decoded(place: str, data: bytes) -> Roster:
    """A roster as anybody may have written it. `place` says in messages where it comes from."""
    try:
        return msgspec.json.decode(data, type=Roster)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        if _is_of_version_1(data):
            raise KeysError(
                f"{place} was made by an earlier version of BAFFLE, which did not sign it; make new keys with"
                " `baffle keys new`"
            ) from None
        raise KeysError(f"{place} is not a roster: {fault}") from None


def _require_sound(place: str, data: bytes, roster: Roster, authority: bytes) -> None:
    """Refuse a roster that the authority did not sign, or that it should not have signed."""
    if not signed(authority, bytes.fromhex(roster.signature), roster.signed_text()):
        raise KeysError(
            f"{place} is not signed by the authority of authority.pub; take both from the same `baffle keys new`"
        )
    if roster.encode() != data:
        raise KeysError(f"{place} is not written as `baffle keys` writes it; take the original file")
    _require_no_key_twice(place, roster)
    if not roster.participants():
        raise KeysError(f"{place} has no client left; expected at least one: `baffle keys add` makes new ones")


def _is_of_version_1(data: bytes) -> bool:
    try:
        msgspec.json.decode(data, type=_RosterOfVersion1)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _require_no_key_twice(place: str, roster: Roster) -> None:
    holders = {roster.server: "the server"}
    for number, client in roster.participants().items():
        if client.identity in holders:
            raise KeysError(
                f"{place} gives client {number} the identity of {holders[client.identity]}; expected one for each:"
                " make new keys with `baffle keys new`"
            )
        holders[client.identity] = f"client {number}"


def require_not_expired(place: str, roster: Roster) -> None:
    try:
        expiry = roster.expiry
    except ValueError:
        raise KeysError(
            f"{place} expires at {roster.expires}, which is no moment; make new keys with `baffle keys new`"
        ) from None
    if (moment := now()) >= expiry:
        raise KeysError(
            f"{place} expired at {roster.expires}, and this machine's clock says {moment:%Y-%m-%dT%H:%M:%SZ};"
            " set the clock if it is wrong, else take a later roster: `baffle keys renew` makes one"
        )


def now() -> datetime:
    return datetime.now(UTC)
