"""Makes the keys of a federation, once, on a trusted machine, to be handed out; and changes later who belongs to it.

    keys/authority.key                   signs rosters                  } not needed by any running
    keys/ca.key, keys/ca.pem             issue server certificates      } process: keep them offline
    keys/server/…                        the server's identity, its certificate and key for TLS, the operator's token,
                                         the roster and the authority's public key; in nodes/ the clients' public node
                                         keys, to register at Flower's SuperLink
    keys/client-0/, keys/client-1/ …     for each client its private key and its SuperNode's, an empty file for its
                                         marks, the CA's certificate, the roster and the authority's public key
    keys/operator/                       for operators: the CA's certificate and the token that shows the status

Each client gets the roster from here and not from the server, so the server cannot add clients that it made up. A later
roster is written to the folders of all clients that are there, and to the server's last: while that one has the old
roster, nothing has changed, and the command may be given again. A number is never used for two rosters.
"""

import secrets
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from baffle.errors import KeysError, first_line
from baffle.files import make_folder, sync_folder
from baffle.network.keys import rosters
from baffle.network.keys.certificates import hosts_in, load_certificate, new_ca, new_certificate
from baffle.network.keys.folders import MARKS_FILE, load_identity, load_token
from baffle.network.keys.rosters import MOST_CLIENTS, ROSTER, Participant, Roster, failing, load_authority, read

DAYS = 3650  # how long certificates and rosters are valid by default
MOST_DAYS = 36_500
TOKEN_BYTES = 32


@dataclass(frozen=True)
class ServerKeys:
    """The server's identity, the files that TLS reads, the hosts that its certificate is for, the operator's token, the
    roster, the public key of the authority that signs rosters, and the folder of all this."""

    identity: Ed25519PrivateKey
    ca: Path
    certificate: Path
    key: Path
    hosts: tuple[str, ...]
    token: str
    roster: Roster
    authority: bytes
    folder: Path

    @classmethod
    def load(cls, folder: Path) -> "ServerKeys":
        roster = rosters.load_roster(folder)
        identity = load_identity(folder / "identity.key")
        if identity.public_key().public_bytes_raw() != roster.server_key:
            raise KeysError(
                f"{folder / 'identity.key'} is not the server's in {folder / 'roster.json'};"
                " take both from the same `baffle keys new`"
            )
        ca, certificate, key = (folder / name for name in ("ca.pem", "server.pem", "server.key"))
        hosts = hosts_in(_checked_certificate(ca, certificate, key))
        token, authority = load_token(folder), load_authority(folder)
        return cls(identity, ca, certificate, key, hosts, token, roster, authority, folder)

    def under(self, roster: Roster) -> "ServerKeys":
        if self.identity.public_key().public_bytes_raw() != roster.server_key:
            raise KeysError(f"roster {roster.number} names another server than this one")
        return replace(self, roster=roster)

    def rereading(self) -> rosters.Reread:
        """Looks for a later roster in this folder of keys."""
        file = rosters.RosterFile(self.folder, self.authority, self.roster)

        def reread() -> Roster | None:
            roster = file.reread()
            return self.under(roster).roster if roster else None

        return reread


@dataclass(frozen=True)
class NewClient:
    """The private keys of a new client: its own, and its SuperNode's for Flower's SuperLink."""

    identity: Ed25519PrivateKey
    node: ec.EllipticCurvePrivateKey

    @classmethod
    def generate(cls) -> "NewClient":
        return cls(Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP384R1()))

    def participant(self) -> Participant:
        public = self.node.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        return Participant(_public(self.identity), public.decode())

    def files(self) -> dict[str, bytes]:
        node = self.node.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        return {"identity.key": _pem(self.identity), "node.key": node, MARKS_FILE: b""}


def make_keys(folder: Path, clients: int, hosts: Sequence[str], days: int = DAYS) -> None:
    """Write the keys of a new federation into a new folder. `hosts` are the names or addresses at which clients will
    reach the server, `days` is how long its certificate and the roster are valid."""
    with failing(f"{folder} cannot be used", "; give a new folder"):
        occupied = folder.exists() and any(folder.iterdir())
    if occupied:
        raise KeysError(f"{folder} is not empty; keys are made only once: give a new folder")
    if not 1 <= clients <= MOST_CLIENTS:
        raise KeysError(f"expected 1 to {MOST_CLIENTS:,} clients, got {clients}")
    expiry = in_days(days)
    authority, server = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    members = [NewClient.generate() for _ in range(clients)]
    participants = tuple(member.participant() for member in members)
    roster = sign_roster(Roster(1, moment(expiry), _public(server), participants, ""), authority)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = new_ca(ca_key)
    tls_key = ec.generate_private_key(ec.SECP256R1())
    certificate = new_certificate(tls_key, ca, ca_key, hosts, expiry)

    for_all = {"ca.pem": _certificate_pem(ca)}
    for_members = for_all | {"authority.pub": f"{_public(authority)}\n".encode(), "roster.json": roster.encode()}
    for_operators = {"operator.token": f"{secrets.token_hex(TOKEN_BYTES)}\n".encode()}
    write_files(folder, for_all | {"authority.key": _pem(authority), "ca.key": _pem(ca_key)})
    tls = {"server.pem": _certificate_pem(certificate), "server.key": _pem(tls_key)}
    write_files(folder / "server", for_members | for_operators | tls | {"identity.key": _pem(server)})
    write_files(folder / "server" / "nodes", {f"client-{n}.pub": c.node.encode() for n, c in enumerate(participants)})
    write_files(folder / "operator", for_all | for_operators)
    for number, member in enumerate(members):
        write_files(folder / f"client-{number}", for_members | member.files())


def sign_roster(unsigned: Roster, authority: Ed25519PrivateKey) -> Roster:
    return msgspec.structs.replace(unsigned, signature=authority.sign(unsigned.signed_text()).hex())


def renew_certificate(folder: Path, hosts: Sequence[str] = (), days: int = DAYS) -> x509.Certificate:
    """Replace server.pem and server.key in a folder that `make_keys` made. Clients need nothing new: they trust the CA.
    Without `hosts`, the new certificate is for the same ones as the present certificate."""
    ca_file, ca_key_file, present = folder / "ca.pem", folder / "ca.key", folder / "server" / "server.pem"
    ca, ca_key = load_certificate(ca_file), load_private(ca_key_file)
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey) or ca_key.public_key() != ca.public_key():
        raise KeysError(f"{ca_key_file} is not the key of {ca_file}; take both from the same `baffle keys new`")
    if not hosts and not present.exists():
        raise KeysError(f"{present} is missing, so its hosts are not known; give the server's names and addresses")
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = new_certificate(key, ca, ca_key, hosts or hosts_in(load_certificate(present)), in_days(days))
    _replace(folder / "server", {"server.pem": _certificate_pem(certificate), "server.key": _pem(key)})
    return certificate


class Added(NamedTuple):
    """What `add_clients` has made: a roster, and the numbers of the new clients."""

    roster: Roster
    numbers: tuple[int, ...]


def add_clients(folder: Path, count: int = 1) -> Added:
    """Make new clients, each with a folder client-N. They get the first empty places; if there are none, new ones."""
    if count < 1:
        raise KeysError(f"expected at least one new client, got {count}")
    authority, present = _opened(folder)
    rosters.require_not_expired(str(folder / "server" / ROSTER), present)
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
    rosters.require_not_expired(str(folder / "server" / ROSTER), present)
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
    end = moment(in_days(days))
    if end <= present.expires:
        raise KeysError(
            f"roster {present.number} expires at {present.expires}, and in {days} days it is {end}; expected a later "
            "moment: give more --days"
        )
    roster = _next(folder, authority, present, present.clients, end)
    _hand_out(folder, roster)
    return roster


def in_days(days: int) -> datetime:
    if not 1 <= days <= MOST_DAYS:
        raise KeysError(f"expected 1 to {MOST_DAYS:,} days, got {days}")
    return datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)


def moment(when: datetime) -> str:
    return f"{when:%Y-%m-%dT%H:%M:%SZ}"


def _public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def _pem(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write files that only their owner can read."""
    for name, data in files.items():
        path = folder / name
        with failing(f"{path} cannot be written"):
            make_folder(folder)
            path.touch(mode=0o600)
            path.write_bytes(data)


def _replace(folder: Path, files: dict[str, bytes]) -> None:
    """Write files that only their owner can read in place of older ones, once all of them are complete."""
    new = {name: folder / f".{name}.new" for name in files}
    with failing(f"{folder} cannot be changed"):
        for path in new.values():
            path.unlink(missing_ok=True)
        write_files(folder, {path.name: files[name] for name, path in new.items()})
        for name, path in new.items():
            path.replace(folder / name)


def load_private(path: Path) -> object:
    try:
        return load_pem_private_key(read(path, private=True), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as fault:
        raise KeysError(f"{path} is not a private key: {first_line(fault)}") from None


def _checked_certificate(ca: Path, certificate: Path, key: Path) -> x509.Certificate:
    """The server's certificate, if the CA issued it for this key and it has not expired."""
    own = load_certificate(certificate)
    try:
        own.verify_directly_issued_by(load_certificate(ca))
        public = own.public_key()
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        raise KeysError(f"{certificate} was not issued by {ca}; take both from the same `baffle keys new`") from None
    private = load_private(key)
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != public:
        raise KeysError(f"{key} is not the key of {certificate}; take both from the same folder")
    if datetime.now(UTC) >= (end := own.not_valid_after_utc):
        raise KeysError(f"{certificate} expired at {moment(end)}; make a new one with `baffle keys certificate`")
    return own


def _opened(folder: Path) -> tuple[Ed25519PrivateKey, Roster]:
    """The authority's private key, and the present roster: the server's."""
    key = folder / "authority.key"
    if not key.exists():
        raise KeysError(f"{key} is missing; put the authority's key there for this command, and away again afterwards")
    authority = load_identity(key)
    if authority.public_key().public_bytes_raw() != load_authority(folder / "server"):
        public = folder / "server" / "authority.pub"
        raise KeysError(f"{key} is not the key of {public}; take both from the same folder")
    return authority, rosters.read_roster(folder / "server")


def _next(
    folder: Path, authority: Ed25519PrivateKey, present: Roster, clients: Collection[Participant | None], end: str = ""
) -> Roster:
    """The next roster, signed. Its number is also higher than that of a roster whose command did not get to its end."""
    begun = [rosters.read_roster(path.parent).number for path in folder.glob(f"client-*/{ROSTER}")]
    number = 1 + max([present.number, *begun])
    if number > rosters.LAST_NUMBER:
        raise KeysError(f"roster {present.number} has the last number that there is; make new keys: `baffle keys new`")
    return sign_roster(Roster(number, end or present.expires, present.server, tuple(clients), ""), authority)


def _hand_out(folder: Path, roster: Roster) -> None:
    """Write a roster to the folders of its clients that are here, and then to the server's."""
    for client in (folder / f"client-{number}" for number in roster.participants()):
        if (client / ROSTER).exists():  # others may have been handed out and deleted
            rosters.keep_roster(client, roster)
    nodes = folder / "server" / "nodes"
    if nodes.is_dir():
        participants = roster.participants()
        write_files(nodes, {f"client-{number}.pub": client.node.encode() for number, client in participants.items()})
        for number in set(range(len(roster.clients))) - participants.keys():
            (nodes / f"client-{number}.pub").unlink(missing_ok=True)
    rosters.keep_roster(folder / "server", roster)


def _make_whole(folder: Path, number: int, files: dict[str, bytes]) -> None:
    """Make a client's folder, whole or not at all. One that is in its place is set aside."""
    _set_aside(folder, number)
    new, path = folder / f".client-{number}.new", folder / f"client-{number}"
    with failing(f"{path} cannot be written"):
        shutil.rmtree(new, ignore_errors=True)
        write_files(new, files)
        new.rename(path)
        sync_folder(folder)


def _set_aside(folder: Path, number: int) -> None:
    """Rename a client's folder, if it is here, to client-N.revoked-1, or to the next that is free."""
    path = folder / f"client-{number}"
    if not path.exists():
        return
    times = 1
    while (aside := folder / f"client-{number}.revoked-{times}").exists():
        times += 1
    with failing(f"{path} cannot be renamed to {aside.name}"):
        path.rename(aside)


def _listed(numbers: Collection[int]) -> str:
    shown = [str(number) for number in sorted(numbers)[:10]]
    return ", ".join([*shown, "…"] if len(numbers) > len(shown) else shown)
