"""What a server settles when it knows its clients."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from baffle.errors import PlanError, RunFolderError
from baffle.network.joining import Introduction
from baffle.network.settling import SETTLED, Settled, read_settled, remove_settled, settle, write_settled
from baffle.plan import Plan, change
from baffle.schedule import tiers_of
from tests.support.memory import at_most


@pytest.fixture
def four(tiny: Callable[..., Plan]) -> Plan:
    return tiny('secure.mode="on"', "federation.clients=4")


def introductions(*affords: int) -> dict[int, Introduction]:
    return {number: Introduction(10 + number, k, 0) for number, k in enumerate(affords)}


def test_the_server_settles_the_plan_from_the_clients_introductions(four: Plan) -> None:
    plan, tiers = settle(four, introductions(0, 3, 9, 4))
    assert tiers == (4, 3, 4, 4)
    assert [(tier.k, tier.share) for tier in plan.federation.tiers] == [(3, 1 / 4)]
    assert plan.ring.n_max == 13
    tiered = change(four, ["federation.tiers=[{k=1, share=0.25}]"])
    assert settle(tiered, introductions(0, 0, 0, 0))[1] == tuple(tiers_of(tiered))
    uniform = change(four, ['federation.weighting="uniform"'])
    assert settle(uniform, introductions(0))[0].ring.n_max == 1
    fixed = change(four, ["ring.n_max=7"])
    assert settle(fixed, introductions(0))[0].ring.n_max == 7


def test_a_tier_whose_last_directions_would_be_seen_is_refused(four: Plan) -> None:
    with pytest.raises(PlanError, match=r"only 2 clients afford 4 directions.*expected at least 3.*set probe.k=3"):
        settle(four, introductions(0, 2, 3, 4))
    without_secure_sums = change(four, ['secure.mode="off"'])
    assert settle(without_secure_sums, introductions(0, 2, 3, 4))[1] == (4, 2, 3, 4)


def test_what_was_settled_is_read_back_and_is_its_owners_alone(tmp_path: Path) -> None:
    settled = Settled("ab" * 32, (4, 3, 0))
    write_settled(tmp_path, settled)
    assert read_settled(tmp_path) == settled
    assert stat.S_IMODE((tmp_path / SETTLED).stat().st_mode) == 0o600
    (tmp_path / f".{SETTLED}.new").touch()  # left behind by a server that was killed
    remove_settled(tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[" * 1_000_000,
        b"{}",
        b'{"run": "ab", "tiers": [4]}',
        b'{"run": "' + b"z" * 64 + b'", "tiers": [4]}',
        b'{"run": "' + b"a" * 64 + b'", "tiers": [-1]}',
        b'{"run": "' + b"a" * 64 + b'", "tiers": [1e300]}',
        b'{"run": "' + b"a" * 64 + b'", "tiers": {"0": 4}}',
    ],
)
def test_anything_else_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SETTLED).write_bytes(content)
    with at_most(8 << 20), pytest.raises(RunFolderError, match=r"network\.json cannot be read: .*, or is damaged"):
        read_settled(tmp_path)


def test_a_file_that_never_ends_is_not_read(tmp_path: Path) -> None:
    (tmp_path / SETTLED).touch()
    os.truncate(tmp_path / SETTLED, 1 << 40)
    with at_most(1 << 20), pytest.raises(RunFolderError, match="longer than"):
        read_settled(tmp_path)
