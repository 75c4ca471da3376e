"""Full disks of a server and of a client: they say so, and go on when there is room. A server's limit on open files is
raised where the system allows it, and named where it does not."""

import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baffle.client import replica
from baffle.errors import FullDiskError, RunFolderError
from baffle.journal.audit import verify
from baffle.journal.store import Journal
from baffle.network.link.door import KEPT, Door
from baffle.network.server.machine import PAUSE, SPARE, files_for, require_open_files
from baffle.plan import change
from baffle.simulation import repeat
from tests.support.clocks import FakeClock
from tests.support.environments import SmallDisk, small_disk
from tests.support.lines_in_memory import Federation

FULL = "cannot be written: (No space left on device|database or disk is full)"


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


class ClockOfAFullDisk(FakeClock):
    """There is room again when the server has waited for a while."""

    def __init__(self, disk: SmallDisk) -> None:
        super().__init__()
        self.disk, self.pauses = disk, 0

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.pauses += seconds == PAUSE
        if self.pauses == 5:
            self.disk.free()


def serve_patiently(federation: Federation, disk: SmallDisk, fill_at: int) -> str:
    """Serve on a disk that is full from one exchange on, until the server has said so and tried a few times. Returns
    the file that it could not write."""
    lines = federation.lines(4)
    lines.at[fill_at] = disk.fill
    lines.clock = ClockOfAFullDisk(disk)
    federation.serve(lines)
    (waits,) = (index for index, line in enumerate(federation.told) if "waits until there is room" in line)
    assert federation.told[waits + 1] == "there is room on the disk again; the run goes on"
    said = re.fullmatch(rf"{federation.run}/(.*) {FULL}; the run waits until there is room", federation.told[waits])
    assert said, federation.told[waits]
    return said[1]


@pytest.mark.parametrize(
    ("fill_at", "file"),
    [
        (2, "journal.sqlite"),  # the statement of the first epoch
        (6, "kept"),  # the vectors of the first round are on their way
        (7, "journal.sqlite"),  # its shares are
    ],
)
def test_a_server_waits_for_room_and_loses_no_round(
    federation: Federation, servers_disk: SmallDisk, tmp_path: Path, fill_at: int, file: str
) -> None:
    assert serve_patiently(federation, servers_disk, fill_at) == file
    expected = repeat(federation.run, tmp_path / "repeated")["weights_sha256"]
    assert federation.require_agreement(range(4)) == expected
    metrics = (federation.run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in metrics] == list(range(6))


def test_a_server_started_on_a_full_disk_waits_for_room(federation: Federation, servers_disk: SmallDisk) -> None:
    federation.serve(federation.lines(4))
    federation.plan = change(federation.plan, ["rounds=8"])
    servers_disk.fill()
    assert serve_patiently(federation, servers_disk, fill_at=0) == "plan.toml"
    assert verify(federation.run).rounds == 8
    assert verify(federation.run).skipped == 0
    federation.require_agreement(range(4))


def test_a_journal_is_not_called_damaged_on_a_full_disk(federation: Federation, servers_disk: SmallDisk) -> None:
    """To read it, SQLite needs a few kilobytes."""
    left = servers_disk.folder / "left.sqlite"

    def copy() -> None:
        for ending in ("", "-wal"):
            Path(f"{left}{ending}").write_bytes((federation.run / f"journal.sqlite{ending}").read_bytes())

    lines = federation.lines(4)
    lines.at[11] = copy
    federation.serve(lines)
    servers_disk.fill()
    with pytest.raises(FullDiskError, match="cannot be written"):
        Journal.begun(left)
    servers_disk.free()
    assert Journal.begun(left)


def test_any_other_trouble_ends_the_run(federation: Federation) -> None:
    lines = federation.lines(4)

    def spoil() -> None:
        (federation.run / "metrics.jsonl").unlink()
        (federation.run / "metrics.jsonl").mkdir()

    lines.at[6] = spoil
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl cannot be written: Is a directory"):
        federation.serve(lines)
    assert not federation.said("waits")


@pytest.mark.parametrize(("file", "fill_at"), [("marks", 5), ("replica", 5), ("replica", 7)])
def test_a_client_abstains_until_there_is_room(
    federation: Federation, clients_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch, file: str, fill_at: int
) -> None:
    federation.plan = change(federation.plan, ["rounds=12"])
    if file == "replica":
        monkeypatch.setattr(replica, "SAVE_SECONDS", 0.0)
    log = list[str]()
    lines = federation.lines(4)
    lines.clients[2] = federation.member(2, tell=log.append).answer

    # The page that the marks end in has room for some rounds
    lines.at = {fill_at: lambda: clients_disk.fill(leave=1 if file == "replica" else 0), 20: clients_disk.free}
    summary = federation.serve(lines)
    assert (summary["rounds"], summary["skipped_rounds"]) == (12, 0)
    assert any(f"{file} cannot be written: No space left on device; this client takes no part" in line for line in log)
    with Journal.open(federation.run / "journal.sqlite") as journal:
        assert journal.participation.last_contributions(4) == dict.fromkeys(range(4), 11)
        assert journal.participation.contributions(4)[2] < 12
        refused = [words for record in journal.metrics() for words in record.get("refused", [])]
    assert set(refused) == {"client 2: abstained"}  # the server learns no more
    assert not any(str(clients_disk.folder) in line for line in federation.told)
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


# Open files


PROGRAM = """
import json, os, resource, sys
from baffle.network.server.machine import require_open_files

clients, soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
told = []
require_open_files(clients, told.append)
opened = 0
try:
    while opened < clients:
        os.dup(2)
        opened += 1
except OSError:
    pass
print(json.dumps([resource.getrlimit(resource.RLIMIT_NOFILE), told, opened]))
"""

MOST = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def after(clients: int, soft: int, hard: int) -> tuple[int, list[str], int]:
    """A process with these limits requires files for its clients: its limit then, what it told, and how many of the
    clients' files it could open. It is a process of its own, since a hard limit cannot be taken back."""
    if MOST != resource.RLIM_INFINITY and hard > MOST:
        pytest.skip(f"needs a hard limit of {hard} open files, and this machine allows {MOST}")
    command = [sys.executable, "-c", PROGRAM, *map(str, (clients, soft, hard))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    limits, told, opened = json.loads(done.stdout)
    assert limits[1] == hard
    return limits[0], told, opened


@pytest.mark.parametrize(
    ("clients", "soft", "hard", "raised"),
    [(1000, 256, 4096, files_for(1000)), (1000, 256, files_for(1000), files_for(1000)), (100, 1024, 4096, 1024)],
    ids=["raised", "as far as it goes", "left alone"],
)
def test_a_limit_is_raised_to_what_clients_need(clients: int, soft: int, hard: int, raised: int) -> None:
    assert after(clients, soft, hard) == (raised, [], clients)


def test_a_hard_limit_that_is_too_low_is_named_with_the_clients_that_fit_and_the_remedy() -> None:
    limit, told, opened = after(1000, soft=256, hard=900)
    assert limit == 900
    assert told == [
        "this server may have 900 files open, which is enough for 231 clients: 1000 clients need 1765; "
        "start it after `ulimit -n 1765` as root, or with LimitNOFILE=1765 in its systemd unit"
    ]
    assert 231 <= opened < 1000


@pytest.mark.parametrize("limit", [0, 639, 640, 641, 642, 648, 649, 650, 767, 768, 2000, 65_536])
def test_as_many_clients_fit_as_the_message_says(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (limit, limit))
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, _limits: None)
    told: list[str] = []
    require_open_files(10**6, told.append)
    fit = int(re.search(r"enough for (\d+) clients", told[0])[1])  # type: ignore[index]
    assert not fit or files_for(fit) <= limit
    assert files_for(fit + 1) > limit


def test_strangers_that_take_every_place_leave_files_for_the_run() -> None:
    """The door's places are counted, so a full doorway takes nothing from journal and log."""
    assert files_for(1000) - 1000 - Door(1000, lambda: 0.0).places - KEPT == SPARE


def test_a_limit_that_the_system_refuses_to_raise_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, which can say that there is no hard limit and still refuse."""

    def refuse(_kind: int, _limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (768, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    told: list[str] = []
    require_open_files(20_000, told.append)
    assert told[0].startswith("this server may have 768 files open, which is enough for 114 clients: 20000 clients")


def test_no_limit_at_all_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    told: list[str] = []
    require_open_files(10**9, told.append)
    assert told == []
