"""Full disks, real ones, of a server and of a client: they say so, and go on when there is room."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Timer

import pytest

from baffle.client import replica
from baffle.errors import FullDiskError, RunFolderError
from baffle.journal.audit import verify
from baffle.journal.store import Journal
from baffle.network import connected, full_disk, serve
from baffle.network.full_disk import WaitForRoom
from baffle.network.keys import ClientKeys
from baffle.plan import Plan, change
from baffle.repetition import repeat
from tests.support.lines_in_memory import Federation, new_keys
from tests.support.small_disk import SmallDisk, small_disk

FULL = "cannot be written: (No space left on device|database or disk is full)"


@pytest.fixture
def keys(tmp_path: Path) -> list[ClientKeys]:
    return new_keys(tmp_path, 4)


@pytest.fixture
def federation(
    keys: list[ClientKeys], tiny: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Federation:
    monkeypatch.setattr(serve, "LOOK", 0.001)
    monkeypatch.setattr(connected, "AGAIN", 0.0)
    monkeypatch.setattr(full_disk, "PAUSE", 0.01)
    settings = ("federation.clients=4", 'secure.mode="on"', "run.deadline_seconds=5", "run.evaluate_every=100")
    return Federation(keys, tmp_path, tiny(*settings))


@pytest.fixture
def servers_disk(federation: Federation) -> Iterator[SmallDisk]:
    with small_disk(federation.run.parent / "disk") as disk:
        federation.run = disk.folder / "run"
        yield disk


@pytest.fixture
def clients_disk(federation: Federation) -> Iterator[SmallDisk]:
    """A disk of its own for client 2, with its keys and its weights."""
    with small_disk(federation.folder / "client-2") as disk:
        keys = federation.keys[2]
        disk.folder.joinpath("marks").write_bytes(b"")
        federation.keys[2] = replace(keys, folder=disk.folder)
        yield disk


def serve_patiently(federation: Federation, disk: SmallDisk, fill_at: int, leave: int = 0) -> str:
    """Serve on a disk that is full, but for some pages, from one exchange on, until the server has said so and tried a
    few times. Returns the file that it could not write."""
    lines = federation.lines(4)

    def fill(exchange: int) -> None:
        if exchange == fill_at:
            disk.fill(leave)

    def tell(words: str) -> None:
        federation.told.append(words)
        if "waits until there is room" in words:
            Timer(0.1, disk.free).start()

    lines.before = fill
    serve.serve(federation.plan, federation.run, lines, federation.roster, tell=tell)
    (waits,) = (index for index, line in enumerate(federation.told) if "waits until there is room" in line)
    assert federation.told[waits + 1] == "there is room on the disk again; the run goes on"
    said = re.fullmatch(rf"{federation.run}/(.*) {FULL}; the run waits until there is room", federation.told[waits])
    assert said, federation.told[waits]
    return said[1]


@pytest.mark.parametrize(
    ("fill_at", "leave", "file"),
    [
        (2, 0, "journal.sqlite"),  # the statement of the first epoch
        (6, 0, "kept"),  # the vectors of the first round are on their way
        (7, 0, "journal.sqlite"),  # its shares are
        (10, 0, "kept"),
        (11, 0, "journal.sqlite"),
    ],
)
def test_a_server_waits_for_room_and_loses_no_round(
    federation: Federation, servers_disk: SmallDisk, tmp_path: Path, fill_at: int, leave: int, file: str
) -> None:
    assert serve_patiently(federation, servers_disk, fill_at, leave) == file
    expected = repeat(federation.run, tmp_path / "repeated")["weights_sha256"]
    assert federation.require_agreement(range(4)) == expected
    metrics = (federation.run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in metrics] == list(range(6))


def test_a_server_that_is_started_on_a_full_disk_waits_for_room(
    federation: Federation, servers_disk: SmallDisk
) -> None:
    federation.serve(federation.lines(4))
    federation.plan = change(federation.plan, ["rounds=8"])
    servers_disk.fill()
    assert serve_patiently(federation, servers_disk, fill_at=0) == "plan.toml"
    assert verify(federation.run).rounds == 8
    assert verify(federation.run).skipped == 0
    federation.require_agreement(range(4))


def test_a_journal_that_a_killed_server_left_is_not_called_damaged_on_a_full_disk(
    federation: Federation, servers_disk: SmallDisk
) -> None:
    """To read it, SQLite needs a few kilobytes."""
    left = servers_disk.folder / "left.sqlite"

    def copy(exchange: int) -> None:
        if exchange == 11:
            for ending in ("", "-wal"):
                Path(f"{left}{ending}").write_bytes((federation.run / f"journal.sqlite{ending}").read_bytes())

    lines = federation.lines(4)
    lines.before = copy
    federation.serve(lines)
    servers_disk.fill()
    with pytest.raises(FullDiskError, match="cannot be written"):
        Journal.begun(left)
    servers_disk.free()
    assert Journal.begun(left)


def test_any_other_trouble_ends_the_run(federation: Federation) -> None:
    lines = federation.lines(4)

    def spoil(exchange: int) -> None:
        if exchange == 6:
            (federation.run / "metrics.jsonl").unlink()
            (federation.run / "metrics.jsonl").mkdir()

    lines.before = spoil
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl cannot be written: Is a directory"):
        federation.serve(lines)
    assert not federation.said("waits")


def test_waiting_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    def full() -> None:
        raise FullDiskError("x cannot be written: full", "free some space")

    monkeypatch.setattr("time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        WaitForRoom(told.append)(full)
    assert told == ["x cannot be written: full; the run waits until there is room"]


@pytest.mark.parametrize(("file", "fill_at"), [("marks", 5), *(("replica", exchange) for exchange in (5, 6, 7, 8))])
def test_a_client_abstains_until_there_is_room(
    federation: Federation, clients_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch, file: str, fill_at: int
) -> None:
    federation.plan = change(federation.plan, ["rounds=12"])
    if file == "replica":
        monkeypatch.setattr(replica, "SAVE_SECONDS", 0.0)
    log = list[str]()
    lines = federation.lines(4)
    lines.clients[2] = federation.member(2, tell=log.append).answer

    def fill_and_free(exchange: int) -> None:
        if exchange == fill_at:
            clients_disk.fill(leave=1 if file == "replica" else 0)
        if exchange == 20:  # the page that the marks end in has room for some rounds
            clients_disk.free()

    lines.before = fill_and_free
    summary = federation.serve(lines)
    assert (summary["rounds"], summary["skipped_rounds"]) == (12, 0)
    assert any(f"{file} cannot be written: No space left on device; this client takes no part" in line for line in log)
    with Journal.open(federation.run / "journal.sqlite") as journal:
        assert journal.participation.last_contributions(4) == dict.fromkeys(range(4), 11)
        assert journal.participation.contributions(4)[2] < 12
        refused = [words for record in journal.metrics() for words in record.get("refused", [])]
    assert set(refused) == {"client 2: abstained"}
    federation.require_agreement(range(4))


def test_a_client_on_a_full_disk_can_be_stopped(federation: Federation, clients_disk: SmallDisk) -> None:
    log = list[str]()
    lines = federation.lines(4)
    lines.clients[2] = federation.member(2, tell=log.append).answer
    federation.serve(lines)
    clients_disk.fill()
    saved = clients_disk.folder / "replica"
    saved.unlink()
    clients_disk.fill()
    federation.members[2].close()
    assert log[-1].startswith(f"the weights are not saved: {saved} cannot be written: No space left on device")
    assert verify(federation.run).rounds == 6
