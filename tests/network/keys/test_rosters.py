"""Later rosters: whoever hands one over, it is taken only if the authority signed it and it is newer; and what was
taken stays."""

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, strategies as st
from msgspec.structs import replace

from baffle.errors import KeysError
from baffle.network.keys import rosters
from baffle.network.keys.authority import ServerKeys, sign_roster
from baffle.network.keys.folders import ClientKeys, load_identity
from baffle.network.keys.rosters import Participant, Roster, RosterFile, keep_roster, load_roster, newer_roster
from tests.support.memory import at_most

Sign = Callable[[Roster], bytes]


@pytest.fixture(scope="module")
def own(federation: Path) -> ClientKeys:
    return ClientKeys.load(federation / "client-1")


@pytest.fixture(scope="module")
def known(own: ClientKeys) -> Roster:
    """Roster 5 of the federation, with an empty place."""
    return replace(own.roster, number=5, clients=(*own.roster.clients, None))


@pytest.fixture(scope="module")
def sign(federation: Path) -> Sign:
    """Signs as the authority, and encodes."""
    authority = load_identity(federation / "authority.key")
    return lambda roster: sign_roster(roster, authority).encode()


def participant() -> Participant:
    return Participant(Ed25519PrivateKey.generate().public_key().public_bytes_raw().hex(), "")


PLACES = st.lists(st.booleans(), min_size=1, max_size=6)


@given(PLACES, PLACES)
def test_other_places_have_another_hash(known: Roster, one: list[bool], other: list[bool]) -> None:
    filled = known.participants()[0]

    def placed(places: list[bool]) -> Roster:
        return replace(known, clients=tuple(filled if place else None for place in places))

    assert (placed(one).hash() == placed(other).hash()) == (one == other)


def test_empty_places_keep_the_numbers_of_others(known: Roster) -> None:
    first, second, third, _ = known.clients
    holey = replace(known, clients=(None, first, None, second, third))
    assert list(holey.directory()) == list(holey.participants()) == [1, 3, 4]
    assert holey.directory()[3] == known.directory()[1]
    assert [holey.number_of(key) for key in known.directory().values()] == [1, 3, 4]
    assert holey.number_of(known.server_key) is None


def test_a_later_roster_is_taken(own: ClientKeys, known: Roster, sign: Sign) -> None:
    first, second, _, _ = known.clients
    for later in (
        replace(known, number=6),
        replace(known, number=2**53),
        replace(known, number=6, clients=(None, second, None, None)),
        replace(known, number=6, clients=(*known.clients[:3], participant(), participant())),
        replace(known, number=6, clients=(first,)),
        replace(known, number=6, server=participant().identity),
        replace(known, number=6, expires="2999-01-01T00:00:00Z"),
    ):
        taken = newer_roster(known, own.authority, sign(later))
        assert replace(taken, signature="") == replace(later, signature="")
        assert newer_roster(taken, own.authority, taken.encode()) == taken  # it may be handed over again


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda roster: replace(roster, clients=(None, None)), "has no client left"),
        (lambda roster: replace(roster, clients=(roster.clients[0], roster.clients[0])), "the identity of client 0"),
        (lambda roster: replace(roster, server=roster.clients[1].identity), "the identity of the server"),
        (lambda roster: replace(roster, clients=roster.clients[1::-1]), "makes client 1 client 0, but a client keeps"),
        (
            lambda roster: replace(roster, clients=(None, *roster.clients)),
            "makes client 0 client 1, but a client keeps",
        ),
        (lambda roster: replace(roster, expires="2020-01-01T00:00:00Z"), "expired at 2020-01-01T00:00:00Z, .* renew"),
        (lambda roster: replace(roster, expires="2099-02-30T00:00:00Z"), "which is no moment"),
        (lambda roster: replace(roster, number=0), "is not a roster"),
    ],
)
def test_what_the_authority_should_not_have_signed_is_refused(
    own: ClientKeys, known: Roster, sign: Sign, change: Callable[[Roster], Roster], reason: str
) -> None:
    with pytest.raises(KeysError, match=f"^the new roster .*{reason}"):
        newer_roster(known, own.authority, sign(change(replace(known, number=6))))


@given(st.data())
def test_a_changed_byte_is_noticed(own: ClientKeys, known: Roster, sign: Sign, data: st.DataObject) -> None:
    good = sign(replace(known, number=6))
    place, removed = data.draw(st.integers(0, len(good))), data.draw(st.integers(0, 2))
    put = data.draw(st.binary(max_size=2) | st.sampled_from([b" ", b"\n", b"null,", b"\\u0061"]))
    changed = good[:place] + put + good[place + removed :]
    if changed != good:
        with pytest.raises(KeysError, match=r"^the new roster ") as fault:
            newer_roster(known, own.authority, changed)
        assert len(str(fault.value).splitlines()) == 1


HOSTILE = {
    "not JSON": b"\xff\xfe",
    "deep places": b'{"number":6,"expires":"","server":"","clients":' + b"[" * 1_000_000,
    "null": b"null",
    "many places": b'{"number":6,"expires":"2099-01-01T00:00:00Z","server":"' + b"0" * 64 + b'","clients":['
    + b"null," * rosters.MOST_CLIENTS + b'null],"signature":"' + b"0" * 128 + b'"}',
    "long": b" " * (rosters.MOST_ROSTER_BYTES + 1),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused_in_little_memory(own: ClientKeys, known: Roster, name: str) -> None:
    with at_most(50 << 20), pytest.raises(KeysError, match=r"^the new roster "):
        newer_roster(known, own.authority, HOSTILE[name])


@pytest.fixture
def folder(federation: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(federation / "client-1", tmp_path / "client-1"))


def test_a_roster_that_is_kept_is_loaded_from_then_on(folder: Path, own: ClientKeys, sign: Sign) -> None:
    later = newer_roster(own.roster, own.authority, sign(replace(own.roster, number=2)))
    before = os.umask(0)
    keep_roster(folder, later)
    os.umask(before)
    assert load_roster(folder) == ClientKeys.load(folder).roster == later
    assert stat.S_IMODE((folder / "roster.json").stat().st_mode) == 0o600
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in own.folder.iterdir())


def test_a_folder_that_cannot_be_written_keeps_its_roster(
    folder: Path, own: ClientKeys, sign: Sign, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = newer_roster(own.roster, own.authority, sign(replace(own.roster, number=2)))

    def full(_handle: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeysError, match=r"roster\.json cannot be written: Read-only file system; its process must be"):
        keep_roster(folder, later)
    assert load_roster(folder) == own.roster


def test_a_process_sees_a_later_roster(
    folder: Path, own: ClientKeys, sign: Sign, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RosterFile(folder, own.authority, own.roster)
    assert file.reread() is None
    for number in (2, 7):
        (folder / "roster.json").write_bytes(sign(replace(own.roster, number=number)))
        later = file.reread()
        assert later is not None
        assert later.number == number
        assert file.reread() is None
    keep_roster(folder, newer_roster(own.roster, own.authority, sign(replace(own.roster, number=8))))
    assert (later := file.reread()) is not None
    assert later.number == 8
    monkeypatch.setattr(rosters, "read", lambda *_: pytest.fail("it was read again"))
    assert file.reread() is None


def test_a_file_that_is_of_no_use_is_reported_once(folder: Path, own: ClientKeys, sign: Sign) -> None:
    file, path = RosterFile(folder, own.authority, own.roster), folder / "roster.json"
    path.write_bytes(sign(replace(own.roster, number=3)))
    assert file.reread() is not None
    for spoil, reason in (
        (lambda: path.write_bytes(b"{"), "is not a roster"),
        (lambda: path.write_bytes(sign(replace(own.roster, number=2))), "has number 2, but roster 3 is known"),
        (path.unlink, "cannot be read"),
    ):
        spoil()
        with pytest.raises(KeysError, match=reason):
            file.reread()
        assert file.reread() is None
    path.write_bytes(sign(replace(own.roster, number=4)))
    assert (later := file.reread()) is not None
    assert later.number == 4


def test_keys_go_on_under_a_later_roster(federation: Path, own: ClientKeys) -> None:
    later = replace(own.roster, number=2, clients=(None, *own.roster.clients[1:]))
    assert own.under(later).number == 1
    assert own.under(later).roster is later
    with pytest.raises(KeysError, match="this client's key is not in roster 2: it was revoked"):
        ClientKeys.load(federation / "client-0").under(later)
    server = ServerKeys.load(federation / "server")
    assert server.under(later).roster is later
    with pytest.raises(KeysError, match="roster 2 names another server"):
        server.under(replace(later, server=participant().identity))
