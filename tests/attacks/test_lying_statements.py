"""A server that tells different clients different things about a run, or tries statements until one suits it, learns no
value of a single client. The attacks are carried out as in test_lying_server.py."""

import secrets
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from baffle.errors import MessageError
from baffle.plan import Plan
from baffle.statement import Statement
from tests.attacks.conftest import CLIENTS, hostile_server
from tests.attacks.hostile_server import HostileServer, RefusedError, refused

Attack = Callable[..., HostileServer]
VICTIM = 2


def changed(statement: Statement, field: str) -> Statement:
    """The statement with one field changed to something else that has the right form."""
    commitments = statement.commitments
    other = {
        "plan": statement.plan.replace('name = "tiny"', 'name = "other"').replace("rounds = 6", "rounds = 7"),
        "initial": secrets.token_bytes(32),
        "roster": statement.roster + 1,
        "roster_hash": secrets.token_bytes(32),
        "tiers": (1, *statement.tiers[1:]),
        "epoch": 1,
        "previous": secrets.token_bytes(32),
        "first": 1,
        "chain": secrets.token_bytes(32),
        "commitments": commitments[:-1],
        "unopened": commitments[:1],
    }[field]
    assert other != getattr(statement, field)
    return msgspec.structs.replace(statement, **{field: other})


FIELDS = [field for field in Statement.__struct_fields__ if field != "protocol"]


@pytest.mark.slow
@given(st.sampled_from(FIELDS), st.sets(st.integers(0, CLIENTS - 1), min_size=1, max_size=CLIENTS - 1))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_split_views_of_any_field_give_no_sum(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Plan], field: str, misled: set[int]
) -> None:
    """Some clients are told a statement that differs in one field from the others'. Then either those clients refuse,
    or no client accepts the keys of one that was told something else, or masks do not cancel."""
    server = hostile_server(tmp_path_factory.mktemp("split"), tiny, "secure.mode=malicious-server")
    assert_no_sum_across(server, field, misled)


@pytest.mark.parametrize("field", ["tiers", "plan", "commitments", "chain", "unopened"])
def test_split_views_give_no_sum(attack: Attack, field: str) -> None:
    assert_no_sum_across(attack("secure.mode=malicious-server"), field, {VICTIM})


def assert_no_sum_across(server: HostileServer, field: str, misled: set[int]) -> None:
    introductions = server.introductions(server.everybody)
    truth = server.statement(introductions)
    lie = changed(truth, field)
    told = {client: lie if client in misled else truth for client in server.everybody}
    nonces: dict[int, bytes] = {}
    for client in server.everybody:
        try:
            nonces[client] = server.nonce(client, told[client])
        except RefusedError:
            assert client in misled  # an honest statement is accepted
    if not misled <= nonces.keys():
        return  # the misled clients noticed by themselves
    for client in server.everybody:
        salters = [one.client for one in told[client].commitments]
        server.enter(client, told[client], b"".join(nonces[salter] for salter in salters))
    view = server.view(truth, b"".join(nonces[one.client] for one in truth.commitments))
    with pytest.raises((RefusedError, MessageError)):
        server.decoded(server.play(view), CLIENTS)
    assert sum("are not signed by it" in line for log in server.victims.logs.values() for line in log)


def test_a_client_opens_its_nonce_for_one_statement(attack: Attack) -> None:
    """A server that could try statements would choose the salt, and with it who is grouped with whom."""
    server = attack()
    truth = server.statement(server.introductions(server.everybody))
    server.nonce(VICTIM, truth)
    assert server.nonce(VICTIM, truth) == server.nonce(VICTIM, truth)
    with refused(server, VICTIM, "used for another statement"):
        server.nonce(VICTIM, changed(truth, "tiers"))
    server.victims.start(VICTIM)  # also after a restart
    server.introductions([VICTIM])
    with refused(server, VICTIM, "used for another statement"):
        server.nonce(VICTIM, changed(truth, "tiers"))


def test_statements_that_reach_no_round_are_limited(attack: Attack) -> None:
    """Grinding: one statement after the other, until the salt suits the server."""
    server = attack()
    for _ in range(8):
        statement = server.statement(server.introductions(server.everybody))
        server.nonce(VICTIM, statement)
        for client in set(server.everybody) - {VICTIM}:
            server.nonce(client, statement)
    server.victims.start(VICTIM)  # a restart forgets nothing
    statement = server.statement(server.introductions(server.everybody))
    with refused(server, VICTIM, "led to no round"):
        server.nonce(VICTIM, statement)


def test_a_statement_for_one_is_refused(attack: Attack) -> None:
    """Too few commitments: the server alone, with one client, would know the salt of everything."""
    server = attack("secure.mode=malicious-server")
    introductions = server.introductions(server.everybody)
    for clients in ([VICTIM], [0, 1, VICTIM]):
        alone = server.statement({client: introductions[client] for client in clients})
        with refused(server, VICTIM, "committed to a nonce, expected at least 4"):
            server.nonce(VICTIM, alone)


def test_made_up_commitments_are_refused(attack: Attack) -> None:
    server = attack("secure.mode=malicious-server")
    truth = server.statement(server.introductions(server.everybody))
    forged = msgspec.structs.replace(truth.commitments[0], commitment=secrets.token_bytes(32))
    with refused(server, VICTIM, "commitment of client 0 is not signed by it"):
        server.nonce(VICTIM, msgspec.structs.replace(truth, commitments=(forged, *truth.commitments[1:])))


def test_other_nonces_than_committed_are_refused(attack: Attack) -> None:
    server = attack()
    truth = server.statement(server.introductions(server.everybody))
    nonces = [server.nonce(client, truth) for client in server.everybody]
    with refused(server, VICTIM, "not those of the statement's commitments"):
        server.enter(VICTIM, truth, b"".join([secrets.token_bytes(32), *nonces[1:]]))


def test_a_late_client_does_not_enter_a_statement_without_its_nonce(attack: Attack) -> None:
    server = attack()
    others = [client for client in server.everybody if client != VICTIM]
    truth = server.statement(server.introductions(others))
    with refused(server, VICTIM, "without this client's commitment"):
        server.nonce(VICTIM, truth)
