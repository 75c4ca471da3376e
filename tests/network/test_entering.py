"""What a client checks before it enters an epoch: every field of a statement that does not fit is refused."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baffle.core.messages import decode, encode
from baffle.errors import BaffleError, RefusalError
from baffle.lineage import Link
from baffle.network.entering import checked_entry
from baffle.network.joining import Begin, Introduction
from baffle.network.keys import ClientKeys
from baffle.plan import Plan, change
from baffle.statement import NOTHING, PastEpoch, Statement, commitment_to, read_statement, run_of
from baffle.trajectory import Epoch
from tests.support.lines_in_memory import new_keys
from tests.support.server_by_hand import ServerByHand

HASH, RUN, SALT = bytes(range(32)), bytes([7] * 32), bytes([8] * 32)
OWN = 1


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[ClientKeys]:
    return new_keys(tmp_path_factory.mktemp("keys"), 4)


@pytest.fixture(scope="module")
def make(keys: list[ClientKeys], tiny: Callable[..., Plan]) -> Callable[..., ServerByHand]:
    return lambda mode: ServerByHand(keys, tiny(f'secure.mode="{mode}"'))


@pytest.fixture(params=["on", "malicious-server"])
def server(make: Callable[..., ServerByHand], request: pytest.FixtureRequest) -> ServerByHand:
    server: ServerByHand = make(request.param)
    return server


def own_introduction(server: ServerByHand, epoch: int = 0) -> Introduction:
    own = server.commitment(OWN, server.introduce(epoch))
    return Introduction(0, own.commitment, own.signature)


def statement_of(server: ServerByHand, **changes: Any) -> Statement:
    return server.statement(OWN, own_introduction(server, changes.get("epoch", 0)), **changes)


def enter(
    server: ServerByHand, statement: Statement, past: tuple[PastEpoch, ...] = (), plan: Plan | None = None
) -> Any:
    return checked_entry(Begin(encode(statement), past), plan or server.plan, server.keys[OWN])


def test_a_statement_that_fits_is_entered(server: ServerByHand) -> None:
    statement = statement_of(server)
    entry = enter(server, statement)
    assert entry.run == run_of(encode(statement))
    assert entry.commitment == commitment_to(server.nonce(OWN))
    lineage = entry.lineage(server.trajectory, SALT)
    assert lineage.trajectory.epochs == (Epoch(0, SALT),)
    assert list(lineage.links) == [Link(0, entry.run, server.chain)]


def test_a_later_epoch_has_its_past(server: ServerByHand) -> None:
    past = (PastEpoch(0, HASH, SALT), PastEpoch(3, RUN, HASH))
    statement = statement_of(server, epoch=2, previous=RUN, first=5, chain=HASH)
    entry = enter(server, statement, past)
    lineage = entry.lineage(server.trajectory, SALT)
    assert lineage.trajectory.epochs == (Epoch(0, SALT), Epoch(3, HASH), Epoch(5, SALT))
    assert list(lineage.links) == [Link(0, HASH, None), Link(3, RUN, None), Link(5, entry.run, HASH)]


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
    "setting",
    ["federation.clients=3", "ring.n_max=0", "run.evaluate_every=3", "run.workers=2", "run.snapshot_every=7"],
)
def test_a_plan_that_is_not_resolved_or_holds_settings_of_a_machine_is_refused(
    server: ServerByHand, setting: str
) -> None:
    """All clients must have been told one plan, and have agreed to all of it."""
    plan = change(server.plan, [setting])
    with pytest.raises(RefusalError, match=r"not resolved|4 tiers, but the roster has 4"):
        enter(server, statement_of(server, plan=plan.to_toml()), plan=plan)


def test_a_statement_without_its_own_commitment_is_not_for_this_client(make: Callable[..., ServerByHand]) -> None:
    server = make("on")
    statement = statement_of(server)
    others = tuple(one for one in statement.commitments if one.client != OWN)
    with pytest.raises(RefusalError, match="waits for the next epoch"):
        enter(server, msgspec.structs.replace(statement, commitments=others))


@pytest.mark.parametrize(("mode", "least"), [("on", 2), ("malicious-server", 3)])
def test_more_than_a_third_must_have_committed_or_two_thirds_if_the_server_may_lie(
    make: Callable[..., ServerByHand], mode: str, least: int
) -> None:
    """Of four clients."""
    server = make(mode)
    statement = statement_of(server)
    own_first = sorted(statement.commitments, key=lambda one: one.client != OWN)
    for number in range(1, 5):
        fewer = tuple(sorted(own_first[:number], key=lambda one: one.client))
        chosen = msgspec.structs.replace(statement, commitments=fewer)
        if number >= least:
            assert enter(server, chosen)
        else:
            with pytest.raises(RefusalError, match=f"{number} clients .* at least {least}"):
                enter(server, chosen)


def test_commitments_of_others_must_be_theirs_if_the_server_may_lie(make: Callable[..., ServerByHand]) -> None:
    """Otherwise the server could choose the nonces of all but one client."""
    server = make("malicious-server")
    statement = statement_of(server)
    forged = msgspec.structs.replace(statement.commitments[2], commitment=HASH)
    for spoilt in (
        msgspec.structs.replace(statement, commitments=(*statement.commitments[:2], forged, statement.commitments[3])),
        msgspec.structs.replace(statement, epoch=1, previous=RUN, first=2),  # signed for another epoch
    ):
        past = (PastEpoch(0, RUN, SALT),) if spoilt.epoch else ()
        with pytest.raises(RefusalError, match=r"commitment of client \d is not signed by it"):
            enter(server, spoilt, past)


def test_a_statement_is_written_in_one_way_only(make: Callable[..., ServerByHand]) -> None:
    statement = statement_of(make("on"))
    data = encode(statement)
    assert read_statement(data) == statement
    one, *others = statement.commitments
    for commitments in ((*others, one), (one, one, *others[1:])):
        with pytest.raises(RefusalError, match="once, in order"):
            read_statement(encode(msgspec.structs.replace(statement, commitments=commitments)))
    for spoilt in (data + b"\0", data[:-1], b"", encode(msgspec.structs.replace(statement, protocol=1))):
        with pytest.raises(BaffleError):
            read_statement(spoilt)
    # The same values, but the epoch as a byte instead of BAFFLE's eight: it would have another hash.
    shorter = data.replace(b"\xd3" + bytes(8), b"\x00", 1)
    assert decode(shorter, Statement) == statement
    with pytest.raises(RefusalError, match="not written as BAFFLE writes it"):
        read_statement(shorter)


@pytest.mark.parametrize("name", [field for field in Statement.__struct_fields__ if field != "protocol"])
def test_every_field_changes_the_name_of_the_run(make: Callable[..., ServerByHand], name: str) -> None:
    statement = statement_of(make("on"))
    others: dict[str, Any] = {
        "plan": statement.plan + " ",
        "initial": RUN,
        "roster": 9,
        "roster_hash": RUN,
        "tiers": (1, 4, 4, 4),
        "epoch": 9,
        "previous": RUN,
        "first": 9,
        "chain": RUN,
        "commitments": statement.commitments[1:],
    }
    assert statement.previous == NOTHING
    assert run_of(encode(msgspec.structs.replace(statement, **{name: others[name]}))) != run_of(encode(statement))
