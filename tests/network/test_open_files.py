"""A server's limit on open files is raised where the system allows it, and named where it does not.

Each case runs in a process of its own, since a process cannot take back a hard limit that it has lowered.
"""

import json
import resource
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baffle.network.link.door import Door
from baffle.network.open_files import SPARE, _clients_with, files_for, require_open_files

PROGRAM = """
import json, os, resource, sys
from baffle.network.open_files import require_open_files

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


@dataclass
class Found:
    soft: int
    hard: int
    told: list[str]
    opened: int


def after(clients: int, soft: int, hard: int) -> Found:
    """A process with these limits requires files for its clients: its limits then, what it told, and how many of the
    clients' files it could open."""
    if MOST != resource.RLIM_INFINITY and hard > MOST:
        pytest.skip(f"needs a hard limit of {hard} open files, and this machine allows {MOST}")
    command = [sys.executable, "-c", PROGRAM, *map(str, (clients, soft, hard))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    (soft, hard), told, opened = json.loads(done.stdout)
    return Found(soft, hard, told, opened)


def test_a_limit_is_raised_to_what_a_thousand_clients_need() -> None:
    found = after(1000, soft=256, hard=4096)
    assert (found.soft, found.hard) == (files_for(1000), 4096)
    assert found.told == []
    assert found.opened == 1000


def test_a_limit_that_is_high_enough_is_left_alone() -> None:
    found = after(100, soft=1024, hard=4096)
    assert (found.soft, found.hard, found.told, found.opened) == (1024, 4096, [], 100)


@pytest.mark.parametrize(("hard", "short"), [(files_for(1000), False), (files_for(1000) - 1, True)])
def test_the_border_is_exact(hard: int, short: bool) -> None:
    found = after(1000, soft=256, hard=hard)
    assert found.soft == hard
    assert bool(found.told) == short


def test_a_hard_limit_that_is_too_low_is_named_with_the_clients_that_fit_and_the_remedy() -> None:
    found = after(1000, soft=256, hard=512)
    assert (found.soft, found.hard) == (512, 512)
    assert found.told == [
        "this server may have 512 files open, which is enough for 342 clients: 1000 clients need 1253; "
        "start it after `ulimit -n 1253` as root, or with LimitNOFILE=1253 in its systemd unit"
    ]
    assert 342 <= found.opened < 1000


@given(st.integers(0, 10**6))
def test_as_many_clients_fit_as_the_message_says(limit: int) -> None:
    fit = _clients_with(limit)
    assert not fit or files_for(fit) <= limit
    assert files_for(fit + 1) > limit


def test_strangers_that_take_every_place_leave_files_for_the_run() -> None:
    """The door's places are counted, so a full doorway takes nothing from journal and log."""
    assert files_for(1000) - 1000 - Door(1000, lambda: 0.0).places == SPARE


def test_a_limit_below_the_spare_files_fits_no_client() -> None:
    found = after(3, soft=40, hard=40)
    assert "enough for 0 clients" in found.told[0]


def test_a_limit_that_the_system_refuses_to_raise_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, which can say that there is no hard limit and still refuse."""

    def refuse(_kind: int, _limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    told: list[str] = []
    require_open_files(20_000, told.append)
    assert told[0].startswith("this server may have 256 files open, which is enough for 114 clients: 20000 clients")


def test_no_limit_at_all_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    told: list[str] = []
    require_open_files(10**9, told.append)
    assert told == []
