"""Adding, revoking and renewing: every change is the next roster, whole or not at all, and nothing is overwritten."""

import os
import shutil
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from baffle.errors import KeysError
from baffle.network.keys import rosters
from baffle.network.keys.authority import ServerKeys, add_clients, make_keys, renew_roster, revoke_clients, sign_roster
from baffle.network.keys.folders import MARKS_FILE, ClientKeys, load_identity
from baffle.network.keys.rosters import LAST_NUMBER, Roster, keep_roster, load_roster, newer_roster, read_roster


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def everybody(keys: Path) -> Roster:
    """The roster, after a check that the server and all clients can use their folders and have the same one."""
    server = ServerKeys.load(keys / "server")
    for number, client in server.roster.participants().items():
        folder = keys / f"client-{number}"
        own = ClientKeys.load(folder)
        assert (own.number, own.roster) == (number, server.roster)
        assert (keys / "server" / "nodes" / f"client-{number}.pub").read_text() == client.node
    assert len(list((keys / "server" / "nodes").iterdir())) == len(server.roster.participants())
    return server.roster


def test_a_revoked_client_leaves_its_place_empty(keys: Path) -> None:
    before = contents(keys)
    roster = revoke_clients(keys, [1])
    assert roster == everybody(keys)
    assert (roster.number, list(roster.directory())) == (2, [0, 2])
    assert len(roster.clients) == 3
    after = contents(keys)
    moved = {name: name.replace("client-1/", "client-1.revoked-1/") for name in before}
    assert after.keys() == {moved[name] for name in before if name != "server/nodes/client-1.pub"}
    changed = {name for name in before if moved[name] in after and after[moved[name]] != before[name]}
    assert changed == {"server/roster.json", "client-0/roster.json", "client-2/roster.json"}


def test_a_new_client_gets_the_first_empty_place_and_nothing_is_overwritten(keys: Path) -> None:
    before = contents(keys)
    revoke_clients(keys, [0, 1])
    added = add_clients(keys)
    assert added.numbers == (0,)
    assert (added.roster.number, list(added.roster.directory())) == (3, [0, 2])
    assert added.roster == everybody(keys)
    old = ClientKeys.load(keys / "client-2").roster.clients[2]
    assert old == read_roster(keys / "client-0.revoked-1").clients[2], "others keep their keys"
    for name in ("identity.key", "node.key"):
        assert (keys / "client-0.revoked-1" / name).read_bytes() == before[f"client-0/{name}"]
        assert (keys / "client-0" / name).read_bytes() != before[f"client-0/{name}"]
    revoke_clients(keys, [0])
    assert add_clients(keys, 2).numbers == (0, 1)
    assert {path.name for path in keys.glob("client-*")} == {
        *("client-0", "client-0.revoked-1", "client-0.revoked-2"),
        *("client-1", "client-1.revoked-1", "client-2"),
    }


def test_without_an_empty_place_new_ones_are_appended(keys: Path) -> None:
    assert add_clients(keys, 2).numbers == (3, 4)
    revoke_clients(keys, [4])
    added = add_clients(keys, 3)
    assert added.numbers == (4, 5, 6)
    assert list(everybody(keys).directory()) == [0, 1, 2, 3, 4, 5, 6]


def test_what_is_made_is_its_owners_alone_and_has_marks(keys: Path) -> None:
    before = os.umask(0)
    add_clients(keys)
    os.umask(before)
    folder = keys / "client-3"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert {path.name for path in folder.iterdir()} == {path.name for path in (keys / "client-0").iterdir()}
    assert (folder / MARKS_FILE).read_bytes() == b""
    assert stat.S_IMODE((keys / "server" / "roster.json").stat().st_mode) == 0o600


def test_a_renewed_roster_has_the_same_members_and_a_later_end(keys: Path) -> None:
    revoke_clients(keys, [1])
    before = everybody(keys)
    roster = renew_roster(keys, 5000)
    assert everybody(keys) == roster
    assert (roster.number, roster.clients, roster.server) == (3, before.clients, before.server)
    assert abs(roster.expiry - datetime.now(UTC) - timedelta(days=5000)) < timedelta(hours=1)
    with pytest.raises(KeysError, match=f"expires at {roster.expires}, and in 7 days .* give more --days"):
        renew_roster(keys, 7)
    with pytest.raises(KeysError, match="expected 1 to 36,500 days"):
        renew_roster(keys, 0)


def test_an_expired_roster_can_be_renewed_and_not_be_changed(keys: Path) -> None:
    roster, authority = load_roster(keys / "server"), load_identity(keys / "authority.key")
    expired = sign_roster(replace(roster, expires="2020-01-01T00:00:00Z"), authority)
    (keys / "server" / "roster.json").write_bytes(expired.encode())
    for change in (lambda: add_clients(keys), lambda: revoke_clients(keys, [0])):
        with pytest.raises(KeysError, match=r"server/roster\.json expired at .* `baffle keys renew` makes one"):
            change()
    renew_roster(keys, 7)
    assert everybody(keys).number == 2


def test_clients_whose_folders_are_elsewhere_are_no_obstacle(keys: Path) -> None:
    shutil.rmtree(keys / "client-0")
    shutil.rmtree(keys / "client-1")
    shutil.rmtree(keys / "server" / "nodes")
    revoke_clients(keys, [1])
    assert add_clients(keys).numbers == (1,)
    roster = ServerKeys.load(keys / "server").roster
    assert ClientKeys.load(keys / "client-1").roster == ClientKeys.load(keys / "client-2").roster == roster
    assert {path.name for path in keys.glob("client-*")} == {"client-1", "client-2"}
    assert not (keys / "server" / "nodes").exists()


CHANGES: dict[str, Callable[[Path], object]] = {
    "add": add_clients,
    "revoke": lambda keys: revoke_clients(keys, [2]),
    "renew": lambda keys: renew_roster(keys, 9000),
}
EACH = pytest.mark.parametrize("change", CHANGES)


@EACH
def test_only_the_authority_changes_a_roster(keys: Path, federation: Path, tmp_path: Path, change: str) -> None:
    make_keys(tmp_path / "others", 1, ["localhost"])
    before = contents(keys / "server")
    shutil.copy(tmp_path / "others" / "authority.key", keys / "authority.key")
    with pytest.raises(KeysError, match=r"authority\.key is not the key of .*authority\.pub"):
        CHANGES[change](keys)
    (keys / "authority.key").unlink()
    with pytest.raises(KeysError, match=r"authority\.key is missing; put the authority's key there"):
        CHANGES[change](keys)
    shutil.copy(federation / "authority.key", keys / "authority.key")
    (keys / "authority.key").chmod(0o640)
    with pytest.raises(KeysError, match=r"can be read or changed by others .*: chmod 600 .*authority\.key"):
        CHANGES[change](keys)
    assert contents(keys / "server") == before
    (keys / "authority.key").chmod(0o600)
    CHANGES[change](keys)
    (keys / "server" / "roster.json").write_bytes(b"{}")
    before = contents(keys)
    with pytest.raises(KeysError, match=r"server/roster\.json is not a roster"):
        CHANGES[change](keys)
    assert contents(keys) == before


@pytest.mark.parametrize("last", range(5))
@EACH
def test_a_change_that_was_interrupted_is_begun_again_under_another_number(
    keys: Path, monkeypatch: pytest.MonkeyPatch, change: str, last: int
) -> None:
    """The server's roster is written last. Whatever was handed out before then has a number that is not used again."""
    handed_out: list[Roster] = []

    def killed(folder: Path, roster: Roster) -> None:
        if len(handed_out) == last:
            raise KeyboardInterrupt
        keep_roster(folder, roster)
        handed_out.append(roster)

    interrupted = False
    with monkeypatch.context() as broken:
        broken.setattr(rosters, "keep_roster", killed)
        try:
            CHANGES[change](keys)
        except KeyboardInterrupt:
            interrupted = True
    begun = max(read_roster(path.parent).number for path in keys.glob("*/roster.json"))
    if interrupted:
        assert load_roster(keys / "server").number == 1
        CHANGES[change](keys)
    roster = everybody(keys)
    assert roster.number == begun + interrupted
    assert all(roster.number > other.number or roster == other for other in handed_out)


def test_numbers_that_are_not_there_are_named(keys: Path) -> None:
    before = contents(keys)
    with pytest.raises(KeysError, match="there is no client 3 in roster 1; it has 0, 1, 2"):
        revoke_clients(keys, [0, 3])
    assert contents(keys) == before
    revoke_clients(keys, [1])
    with pytest.raises(KeysError, match="there is no client 1 in roster 2; it has 0, 2"):
        revoke_clients(keys, [1])
    with pytest.raises(KeysError, match=r"no other clients than 0, 2, and one must be left; add new ones first"):
        revoke_clients(keys, [2, 0, 0])
    with pytest.raises(KeysError, match="at least one new client, got 0"):
        add_clients(keys, 0)
    with pytest.raises(KeysError, match=r"100000 more clients would take 100,002 places, expected at most 100,000"):
        add_clients(keys, 100_000)


def test_there_is_a_last_number(keys: Path) -> None:
    roster, authority = load_roster(keys / "server"), load_identity(keys / "authority.key")
    (keys / "server" / "roster.json").write_bytes(sign_roster(replace(roster, number=LAST_NUMBER), authority).encode())
    with pytest.raises(KeysError, match="has the last number that there is"):
        renew_roster(keys, 9000)


@settings(max_examples=15)
@given(steps=st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_every_roster_is_a_later_one_for_whoever_has_an_earlier_one(
    federation: Path, tmp_path_factory: pytest.TempPathFactory, steps: list[int]
) -> None:
    """Whatever is added and revoked in whatever order: a client that stays takes each roster in place of any before it,
    and nobody's number ever changes."""
    keys = Path(shutil.copytree(federation, tmp_path_factory.mktemp("keys") / "keys"))
    server = ServerKeys.load(keys / "server")
    made = [server.roster]
    for step in steps:
        known = made[-1].directory()
        if step in known and len(known) > 1:
            made.append(revoke_clients(keys, [step]))
        else:
            made.append(add_clients(keys, 1 + step % 2).roster)
    for i, earlier in enumerate(made):
        for later in made[i:]:
            assert newer_roster(earlier, server.authority, later.encode()) == later
    numbers: dict[bytes, set[int]] = {}
    for roster in made:
        for number, key in roster.directory().items():
            numbers.setdefault(key, set()).add(number)
    assert all(len(places) == 1 for places in numbers.values())
