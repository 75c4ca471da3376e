"""Rosters: who belongs to a federation. The authority signs them and numbers them, and a later one takes the place of
an earlier one.

Only the authority can sign a roster, so it does not matter who hands it over. A server or client must never go back to
a lower number: `newer_roster` refuses them, and `keep_roster` makes a later roster durable before anything builds on
it.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec

from baffle.aggregation.context import length_prefixed, signed
from baffle.errors import KeysError
from baffle.files import is_open_to_others, read_file, replace, sync_folder

MOST_CLIENTS = 100_000
MOST_NODE_KEY_LETTERS = 300
MOST_ROSTER_BYTES = 1_000 + MOST_CLIENTS * (MOST_NODE_KEY_LETTERS + 200)
LAST_NUMBER = 2**53
MOST_KEY_FILE_BYTES = 100_000  # of any file but the roster: a key, a certificate, a secret

ROSTER = "roster.json"  # the roster's file in every folder of keys
HANDED_OVER = "the new roster"  # what error messages call a roster that did not come from a file
PublicKey = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Signature = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{128}\Z")]
Moment = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z\Z")]


class Participant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A client's public keys: its identity as 64 hexadecimal digits, its node key in OpenSSH's format."""

    identity: PublicKey
    node: Annotated[str, msgspec.Meta(max_length=MOST_NODE_KEY_LETTERS)]


class Roster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The server, and all clients that may take part. A client's number is its place in `clients`, and never changes.
    A place whose client was revoked is empty (None) until another client gets it. A later roster of the same federation
    has a higher number. `signature` is the authority's, and empty until `authority.sign_roster` has signed."""

    number: Annotated[int, msgspec.Meta(ge=1, le=LAST_NUMBER)]
    expires: Moment
    server: PublicKey
    clients: Annotated[tuple[Participant | None, ...], msgspec.Meta(min_length=1, max_length=MOST_CLIENTS)]
    signature: Signature

    @property
    def server_key(self) -> bytes:
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
        wanted = public.hex()
        return next((number for number, client in self.participants().items() if client.identity == wanted), None)

    def signed_text(self) -> bytes:
        """What the authority signs: every field but the signature. An empty place is two empty fields."""
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
        return sha256(self.signed_text()).digest()

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


def load_roster(folder: Path) -> Roster:
    """The roster in a folder, if the authority whose key lies beside it signed it and it has not expired."""
    roster = read_roster(folder)
    require_not_expired(str(folder / ROSTER), roster)
    return roster


def read_roster(folder: Path) -> Roster:
    """The roster in a folder, if the authority whose key lies beside it signed it. It may have expired."""
    path = folder / ROSTER
    return _checked(str(path), read(path, MOST_ROSTER_BYTES), load_authority(folder))


def load_authority(folder: Path) -> bytes:
    path = folder / "authority.pub"
    return bytes.fromhex(only_line(path, read(path), rb"[0-9a-f]{64}", "a public key: expected 64 hexadecimal digits"))


def newer_roster(known: Roster, authority: bytes, data: bytes) -> Roster:
    """A roster that anybody may have handed over, in place of `known`. It is refused unless the authority signed it, it
    has not expired, its number is higher, and clients keep their numbers. `known` itself may be handed over again."""
    if len(data) > MOST_ROSTER_BYTES:
        raise KeysError(f"{HANDED_OVER} has {len(data):,} bytes, expected at most {MOST_ROSTER_BYTES:,}")
    roster = _checked(HANDED_OVER, data, authority)
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
    """Replace the roster in a folder of keys, durably. A reader finds the old one or the new one, whole."""
    path = folder / ROSTER
    with failing(f"{path} cannot be written", "; its process must be able to write to its folder of keys"):
        replace(path, roster.encode())
        sync_folder(folder)


Reread = Callable[[], Roster | None]  # a later roster, if there is one; a KeysError, once, if it cannot be used


class RosterFile:
    """The roster of a folder while a process runs: `reread` returns a later one that has replaced it."""

    def __init__(self, folder: Path, authority: bytes, known: Roster) -> None:
        self._path, self._authority, self._known = folder / ROSTER, authority, known
        self._seen: tuple[int, ...] = ()  # differs once the file was replaced; empty if it is not there

    def reread(self) -> Roster | None:
        """The later roster in the file; None as long as there is none. It costs little while the file stays as it is.
        A file that cannot be used is a KeysError once, until it is replaced again."""
        try:
            about = self._path.stat()
            seen: tuple[int, ...] = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)
        except OSError:
            seen = ()
        if seen == self._seen:
            return None
        self._seen = seen
        before = self._known
        self._known = newer_roster(before, self._authority, read(self._path, MOST_ROSTER_BYTES))
        return None if self._known == before else self._known


def _checked(place: str, data: bytes, authority: bytes) -> Roster:
    """A roster that anybody may have written, refused if the authority did not sign it, or should not have."""
    try:
        roster = msgspec.json.decode(data, type=Roster)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise KeysError(f"{place} is not a roster: {fault}; expected one that `baffle keys` made") from None
    if not signed(authority, bytes.fromhex(roster.signature), roster.signed_text()):
        raise KeysError(
            f"{place} is not signed by the authority of authority.pub; take both from the same `baffle keys new`"
        )
    if roster.encode() != data:
        raise KeysError(f"{place} is not written as `baffle keys` writes it; take the original file")
    if not roster.participants():
        raise KeysError(f"{place} has no client left; expected at least one: `baffle keys add` makes new ones")
    holders = {roster.server: "the server"}
    for number, client in roster.participants().items():
        if client.identity in holders:
            raise KeysError(
                f"{place} gives client {number} the identity of {holders[client.identity]}; expected one for each:"
                " make new keys with `baffle keys new`"
            )
        holders[client.identity] = f"client {number}"
    return roster


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


# Files of keys: bounded, and private if they give away a secret


def read(path: Path, most: int = MOST_KEY_FILE_BYTES, *, private: bool = False) -> bytes:
    """A file's contents. If it is private, it gives away a secret, and must be its owner's alone."""
    with failing(f"{path} cannot be read", "; expected a folder that `baffle keys new` made"):
        data, is_open = read_file(path, most), is_open_to_others(path)
    if private and is_open:
        raise KeysError(f"{path} can be read or changed by others than its owner; make it private: chmod 600 {path}")
    return data


@contextmanager
def failing(what: str, hint: str = "") -> Iterator[None]:
    """Raise a KeysError that says what cannot be done, and why, if the system refuses it."""
    try:
        yield
    except OSError as fault:
        raise KeysError(f"{what}: {fault.strerror or fault}{hint}") from None


def only_line(path: Path, data: bytes, pattern: bytes, expected: str) -> str:
    """The one line of a file, without its end, if it matches the pattern."""
    line = data.removesuffix(b"\n")
    if not re.fullmatch(pattern, line):
        raise KeysError(f"{path} is not {expected}, as `baffle keys new` writes")
    return line.decode()
