"""Changes who belongs to a federation: the authority signs the next roster of a folder that authority.py made.

The new roster is written to the folders of all clients that are there, and to the server's last: while that one has the
old roster, nothing has changed, and the command may be given again. A number is never used for two rosters.
"""

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from baffle.errors import KeysError
from baffle.files import sync_folder
from baffle.network.authority import DAYS, NewClient, in_days, moment, sign_roster, write_files
from baffle.network.key_files import read
from baffle.network.keys import load_identity
from baffle.network.rosters import (
    LAST_NUMBER,
    MOST_CLIENTS,
    ROSTER,
    Participant,
    Roster,
    keep_roster,
    load_authority,
    read_roster,
    require_not_expired,
)


@dataclass(frozen=True)
class Added:
    """What `add_clients` has made: a roster, and the numbers of the new clients."""

    roster: Roster
    numbers: tuple[int, ...]


def add_clients(folder: Path, count: int = 1) -> Added:
    """Make new clients, each with a folder client-N. They get the first empty places; if there are none, new ones."""
    if count < 1:
        raise KeysError(f"expected at least one new client, got {count}")
    authority, present = _opened(folder)
    require_not_expired(str(folder / "server" / ROSTER), present)
    empty = [number for number, client in enumerate(present.clients) if client is None]
    places = len(present.clients)
    numbers = tuple((empty + list(range(places, places + count)))[:count])
    clients = [*present.clients, *[None] * max(0, count - len(empty))]
    if len(clients) > MOST_CLIENTS:
        raise KeysError(f"{count} more clients would take {len(clients):,} places, expected at most {MOST_CLIENTS:,}")
    new = {number: NewClient.generate() for number in numbers}
    for number, client in new.items():
        clients[number] = client.participant()
    roster = _next(folder, authority, present, clients)
    for_members = {name: read(folder / "server" / name) for name in ("ca.pem", "authority.pub")}
    for number, client in new.items():
        _make_whole(folder, number, for_members | {ROSTER: roster.encode()} | client.files())
    _hand_out(folder, roster)
    return Added(roster, numbers)


def revoke_clients(folder: Path, numbers: Collection[int]) -> Roster:
    """Empty the places of these clients. Their folders, if they are here, are set aside."""
    authority, present = _opened(folder)
    require_not_expired(str(folder / "server" / ROSTER), present)
    known = present.participants()
    for number in numbers:
        if number not in known:
            raise KeysError(f"there is no client {number} in roster {present.number}; it has {_listed(known)}")
    if not known.keys() - set(numbers):
        raise KeysError(
            f"roster {present.number} has no other clients than {_listed(known)}, and one must be left; add new ones "
            "first: `baffle keys add`"
        )
    clients = [None if number in numbers else client for number, client in enumerate(present.clients)]
    roster = _next(folder, authority, present, clients)
    _hand_out(folder, roster)
    for number in numbers:
        _set_aside(folder, number)
    return roster


def renew_roster(folder: Path, days: int = DAYS) -> Roster:
    """Sign the same server and clients again, with a later end. The present roster may have expired."""
    authority, present = _opened(folder)
    end = in_days(days)
    if moment(end) <= present.expires:
        raise KeysError(
            f"roster {present.number} expires at {present.expires}, and in {days} days it is {moment(end)}; expected a "
            "later moment: give more --days"
        )
    roster = _next(folder, authority, present, present.clients, end)
    _hand_out(folder, roster)
    return roster


def _opened(folder: Path) -> tuple[Ed25519PrivateKey, Roster]:
    """The authority's private key, and the present roster: the server's."""
    key = folder / "authority.key"
    if not key.exists():
        raise KeysError(f"{key} is missing; put the authority's key there for this command, and away again afterwards")
    authority = load_identity(key)
    if authority.public_key().public_bytes_raw() != load_authority(folder / "server"):
        raise KeysError(
            f"{key} is not the key of {folder / 'server' / 'authority.pub'}; take both from the same folder"
        )
    return authority, read_roster(folder / "server")


def _next(
    folder: Path,
    authority: Ed25519PrivateKey,
    present: Roster,
    clients: Collection[Participant | None],
    end: datetime | None = None,
) -> Roster:
    """The next roster, signed. Its number is also higher than that of a roster whose command did not get to its end."""
    begun = [read_roster(path.parent).number for path in folder.glob(f"client-*/{ROSTER}")]
    number = 1 + max([present.number, *begun])
    if number > LAST_NUMBER:
        raise KeysError(f"roster {present.number} has the last number that there is; make new keys: `baffle keys new`")
    expires = moment(end) if end else present.expires
    unsigned = replace(present, number=number, expires=expires, clients=tuple(clients), signature="")
    return sign_roster(unsigned, authority)


def _hand_out(folder: Path, roster: Roster) -> None:
    """Write a roster to the folders of its clients that are here, and then to the server's."""
    for client in _folders(folder, roster):
        keep_roster(client, roster)
    nodes = folder / "server" / "nodes"
    if nodes.is_dir():
        participants = roster.participants()
        write_files(nodes, {f"client-{number}.pub": client.node.encode() for number, client in participants.items()})
        for number in set(range(len(roster.clients))) - participants.keys():
            (nodes / f"client-{number}.pub").unlink(missing_ok=True)
    keep_roster(folder / "server", roster)


def _folders(folder: Path, roster: Roster) -> list[Path]:
    """The folders of a roster's clients that are here: others may have been handed out and deleted."""
    paths = [folder / f"client-{number}" for number in roster.participants()]
    return [path for path in paths if (path / ROSTER).exists()]


def _make_whole(folder: Path, number: int, files: dict[str, bytes]) -> None:
    """Make a client's folder, whole or not at all. One that is in its place is set aside."""
    _set_aside(folder, number)
    new, path = folder / f".client-{number}.new", folder / f"client-{number}"
    try:
        shutil.rmtree(new, ignore_errors=True)
        write_files(new, files)
        new.rename(path)
        sync_folder(folder)
    except OSError as fault:
        raise KeysError(f"{path} cannot be written: {fault.strerror or fault}") from None


def _set_aside(folder: Path, number: int) -> None:
    """Rename a client's folder, if it is here, to client-N.revoked-1, or to the next that is free."""
    path = folder / f"client-{number}"
    if not path.exists():
        return
    times = 1
    while (aside := folder / f"client-{number}.revoked-{times}").exists():
        times += 1
    try:
        path.rename(aside)
    except OSError as fault:
        raise KeysError(f"{path} cannot be renamed to {aside.name}: {fault.strerror or fault}") from None


def _listed(numbers: Collection[int]) -> str:
    shown = [str(number) for number in sorted(numbers)[:10]]
    return ", ".join([*shown, "…"] if len(numbers) > len(shown) else shown)
