"""What a client checks before it enters an epoch: every field of a statement that does not fit is refused."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baffle.core.messages import encode
from baffle.errors import RefusalError
from baffle.network.joining import Begin, Introduction
from baffle.network.keys.folders import ClientKeys
from baffle.network.member.consent import checked_epoch
from baffle.plan import Plan, change
from baffle.statement import PastEpoch, Statement, commitment_to, run_of
from baffle.trajectory import Epoch
from tests.support.lines_in_memory import new_keys
from tests.support.server_by_hand import ServerByHand
from tests.support.statements import written

HASH, RUN, SALT = bytes(range(32)), bytes([7] * 32), bytes([8] * 32)
OWN = 1


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[ClientKeys]:
    return new_keys(tmp_path_factory.mktemp("keys"), 4)


@pytest.fixture(scope="module")
def make(keys: list[ClientKeys], tiny: Callable[..., Plan]) -> Callable[..., ServerByHand]:
    return lambda mode: ServerByHand(keys, tiny(f'secure.mode="{mode}"', "federation.weighting=uniform"))


@pytest.fixture(params=["on", "malicious-server"])
def server(make: Callable[..., ServerByHand], request: pytest.FixtureRequest) -> ServerByHand:
    server: ServerByHand = make(request.param)
    return server


def statement_of(server: ServerByHand, **changes: Any) -> Statement:
    own = server.commitment(OWN, server.introduce(changes.get("epoch", 0)))
    return server.statement(OWN, Introduction(0, own.commitment, own.signature), **changes)


def enter(
    server: ServerByHand, statement: Statement, past: tuple[PastEpoch, ...] = (), plan: Plan | None = None
) -> Any:
    return checked_epoch(Begin(encode(statement), past), plan or server.plan, server.keys[OWN])


def test_a_statement_that_fits_is_entered(server: ServerByHand) -> None:
    statement = statement_of(server)
    epoch = enter(server, statement)
    assert epoch.run == run_of(encode(statement))
    assert epoch.commitment == commitment_to(server.nonce(OWN))
    lineage = epoch.lineage(server.trajectory, SALT)
    assert lineage.epochs == (Epoch(0, SALT, epoch.run, server.chain),)
    # A later epoch has its past
    past = (PastEpoch(0, HASH, SALT), PastEpoch(3, RUN, HASH))
    statement = statement_of(server, epoch=2, previous=RUN, first=5, chain=HASH)
    epoch = enter(server, statement, past)
    lineage = epoch.lineage(server.trajectory, SALT)
    assert lineage.epochs == (Epoch(0, SALT, HASH), Epoch(3, HASH, RUN), Epoch(5, SALT, epoch.run, HASH))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"roster": 2}, "roster 2 of the statement is not this client's roster 1"),
        ({"roster_hash": HASH}, "is not this client's roster"),
        ({"tiers": (4, 4, 4)}, "3 tiers, but the roster has 4"),
        ({"tiers": (4,) * 5}, "5 tiers, but the roster has 4"),
        ({"epoch": 1}, "the epochs before are not those that the statement names"),
        ({"previous": RUN}, "the epochs before are not those that the statement names"),
        ({"first": 1}, "the epochs before are not those that the statement names"),
        ({"commitments": ()}, "0 clients have committed to a nonce, expected at least"),
    ],
)
def test_a_field_that_does_not_fit_is_refused(server: ServerByHand, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RefusalError, match=says):
        enter(server, msgspec.structs.replace(statement_of(server), **changes))


def test_a_server_of_another_version_is_refused_in_words(server: ServerByHand) -> None:
    older = written(msgspec.structs.replace(statement_of(server), protocol=2))
    with pytest.raises(
        RefusalError, match="speaks version 2 of the protocol, this client version 3; both need the same"
    ):
        checked_epoch(Begin(older, ()), server.plan, server.keys[OWN])


@pytest.mark.parametrize(
    ("past", "changes", "says"),
    [
        ((PastEpoch(0, HASH, SALT),), {"epoch": 1, "previous": RUN, "first": 2}, "not those that the statement names"),
        ((PastEpoch(0, RUN, SALT),), {"epoch": 2, "previous": RUN, "first": 2}, "not those that the statement names"),
        ((PastEpoch(1, RUN, SALT),), {"epoch": 1, "previous": RUN, "first": 2}, "not those that the statement names"),
        (
            (PastEpoch(0, HASH, SALT), PastEpoch(3, RUN, SALT)),
            {"epoch": 2, "previous": RUN, "first": 2},
            "epochs that do not follow each other",
        ),
    ],
)
def test_a_past_that_does_not_lead_to_the_statement_is_refused(
    server: ServerByHand, past: tuple[PastEpoch, ...], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(RefusalError, match=says):
        enter(server, statement_of(server, **changes), past)


@pytest.mark.parametrize(
    "setting", ["federation.clients=3", "ring.n_max=0", "run.evaluate_every=3", "run.workers=2", "run.snapshot_every=7"]
)
def test_a_plan_that_is_not_resolved_or_names_a_machine_is_refused(server: ServerByHand, setting: str) -> None:
    """All clients must have been told one plan, and have agreed to all of it."""
    plan = change(server.plan, [setting])
    with pytest.raises(RefusalError, match=r"not resolved|4 tiers, but the roster has 4"):
        enter(server, statement_of(server, plan=plan.to_toml()), plan=plan)
