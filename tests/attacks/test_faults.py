"""A client that breaks the rules costs the others little, however often it does so: it is named, left out for a while,
and what it costs is not charged to the others. Real clients, a real server; only the liar's answers are changed."""

import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest

from baffle.aggregation.client.marks import DAY, MOST_FRUITLESS
from baffle.aggregation.messages import Turned
from baffle.aggregation.server.faults import LONGEST, SHORTEST
from baffle.client.abstaining import abstention
from baffle.core.messages import Contribution, decode, encode, tag_of
from baffle.errors import AbortError
from baffle.network.joining import Introduction
from baffle.network.member.policy import Policy
from baffle.plan import Plan
from baffle.statement import Commitment, Statement
from tests.attacks.hostile_server import HostileServer, RefusedError, refused
from tests.support.clocks import FakeClock
from tests.support.lines_in_memory import Answer, Federation, new_keys

LIAR, SILENT, VICTIM = 4, 7, 2
Attack = Callable[..., HostileServer]


@pytest.fixture
def federate(tmp_path: Path, tiny: Callable[..., Plan]) -> Callable[..., Federation]:
    def make(clients: int, *settings: str, policy: Policy | None = None) -> Federation:
        fixed = (f"federation.clients={clients}", "federation.batch=8", "ring.n_max=400", "run.deadline_seconds=1")
        policy = policy or Policy(without_privacy=True, least_liars=1)
        return Federation(new_keys(tmp_path, clients), tmp_path, tiny(*fixed, *settings), policy=policy)

    return make


def never_opening(honest: Answer) -> Answer:
    """Commits to a nonce whenever it is asked, and never opens one."""
    return lambda asked: None if tag_of(asked) == "begin" else honest(asked)


def refusing(honest: Answer) -> Answer:
    """Commits to a nonce whenever it is asked, and agrees to no statement."""
    return lambda asked: abstention(asked) if tag_of(asked) == "begin" else honest(asked)


def spoiling(honest: Answer, most: int = 1000) -> Answer:
    """Sends noise in place of its first vectors, signed and in the right form."""
    spoilt = list[bytes]()

    def answer(asked: bytes) -> bytes | None:
        told = honest(asked)
        if told is None or tag_of(told) != "contribution" or len(spoilt) >= most:
            return told
        contribution = decode(told, Contribution)
        spoilt.append(secrets.token_bytes(len(contribution.vector)))
        return encode(msgspec.structs.replace(contribution, vector=spoilt[-1]))

    return answer


# Clients that do not open their nonces


@pytest.mark.parametrize("lie", [never_opening, refusing])
def test_a_client_that_never_opens_does_not_stop_a_federation(
    federate: Callable[..., Federation], tmp_path: Path, lie: Callable[[Answer], Answer]
) -> None:
    """N10. A statement whose nonces are not all opened leads to no round, and clients open nonces for eight such
    statements a day, in all their runs. The liar comes back whenever it may, for half a day."""
    played = federate(5, "rounds=24", "secure.mode=on")
    lines = played.lines(5)
    lines.seconds, lines.clock.longest = 300.0, 100_000.0
    lines.clients[LIAR] = lie(lines.clients[LIAR])
    summary = played.serve(lines, least=4)
    assert (summary["rounds"], summary["skipped_rounds"]) == (24, 0)
    charged = [line for line in played.told if line.startswith(f"client {LIAR} is left out for")]
    assert len(charged) > MOST_FRUITLESS
    assert charged[1] == f"client {LIAR} is left out for 60 s: it has not opened the nonce that it had committed to"
    honest = [played.members[client] for client in range(5) if client != LIAR]
    assert [len(member.memory._fruitless) for member in honest] == [1] * 4  # only the first time cost them anything
    played.run = tmp_path / "another run"
    lines.clients = {client: played.member(client).answer for client in range(5) if client != LIAR}
    assert played.serve(lines, least=4)["skipped_rounds"] == 0


def test_a_client_that_comes_back_may_take_part_again(federate: Callable[..., Federation]) -> None:
    """Half a minute for the first time, which may have been a broken line."""
    played = federate(5, "rounds=12", "secure.mode=on")
    lines = played.lines(5)
    honest = lines.clients[LIAR]
    lines.clients[LIAR] = never_opening(honest)
    lines.before = lambda _exchange: lines.clients.update({LIAR: honest}) if lines.clock.now() > SHORTEST else None
    played.serve(lines, least=4)
    first, *_, last = played.statements()
    assert [one.client for one in first.unopened] == [LIAR]
    assert LIAR not in first.salters
    assert (last.unopened, last.salters) == ((), tuple(range(5)))
    assert LIAR in played.contributors()[-1]
    played.require_agreement(range(5))


def test_a_client_whose_line_breaks_may_open_its_nonce_until_the_deadline(federate: Callable[..., Federation]) -> None:
    """Also as another process: a broken line is no fault, and costs nobody a statement."""
    played = federate(5, "rounds=6", "secure.mode=on")
    lines = played.lines(5)
    lines.clients[LIAR] = never_opening(lines.clients[LIAR])
    lines.returning[LIAR] = lambda: played.member(LIAR).answer
    played.serve(lines, least=4)
    assert [(one.salters, one.unopened) for one in played.statements()] == [(tuple(range(5)), ())]
    assert not played.said("is left out")
    assert LIAR in played.contributors()[-1]


# A server that uses evidence for itself


def evidence(introductions: dict[int, Introduction], clients: Iterable[int]) -> tuple[Commitment, ...]:
    """What clients have signed, as evidence against them."""
    return tuple(
        Commitment(client, introductions[client].commitment, introductions[client].signature) for client in clients
    )


def test_evidence_allows_one_statement_a_day_for_each_identity(attack: Attack) -> None:
    """A server that tries statements until the salt suits it has the commitments of all honest clients, and may say
    of each that it has not opened them. It gets one statement more a day for each, and no second one."""
    server, clock = attack(), FakeClock(1e9)
    server.victims.members[VICTIM].memory._now = clock
    others = [client for client in server.everybody if client != VICTIM]

    def ground(against: list[int]) -> None:
        """One more statement that leads to no round."""
        introductions = server.introductions(server.everybody)
        salters = {client: one for client, one in introductions.items() if client not in against}
        statement = server.statement(salters)
        told = msgspec.structs.replace(statement, unopened=evidence(introductions, against))
        server.nonce(VICTIM, told)

    for _ in range(2):
        for _ in range(MOST_FRUITLESS):
            ground([])
        for accused in others:
            with refused(server, VICTIM, "led to no round"):
                ground([])
            ground([accused])
            with refused(server, VICTIM, "led to no round"):
                ground([accused])
        with refused(server, VICTIM, "led to no round"):
            ground(others[:3])
        clock.sleep(DAY)


def test_evidence_that_proves_nothing_is_refused(attack: Attack) -> None:
    server = attack()
    introductions = server.introductions(server.everybody)
    statement = server.statement({client: one for client, one in introductions.items() if client != LIAR})
    (proof,) = evidence(introductions, [LIAR])

    def told(*unopened: Commitment) -> Statement:
        return msgspec.structs.replace(statement, unopened=unopened)

    forged = msgspec.structs.replace(proof, commitment=secrets.token_bytes(32))
    with refused(server, VICTIM, f"commitment of client {LIAR} is not signed by it"):
        server.nonce(VICTIM, told(forged))
    for unopened in ((proof, proof), evidence(introductions, [VICTIM]), evidence(introductions, [0, LIAR])):
        with refused(server, VICTIM, "must name each client once"):
            server.nonce(VICTIM, told(*unopened))
    server.nonce(VICTIM, told(proof))


def test_one_client_that_is_shown_other_evidence_is_in_no_sum(attack: Attack) -> None:
    """What a statement says about others is in its name, like everything else."""
    server = attack("secure.mode=malicious-server")
    introductions = server.introductions(server.everybody)
    truth = server.statement({client: one for client, one in introductions.items() if client != LIAR})
    lie = msgspec.structs.replace(truth, unopened=evidence(introductions, [LIAR]))
    present = [client for client in server.everybody if client != LIAR]
    told = {client: lie if client == VICTIM else truth for client in present}
    nonces = b"".join(server.nonce(client, told[client]) for client in present)
    for client in present:
        server.enter(client, told[client], nonces)
    with pytest.raises(RefusedError):
        server.play(server.view(truth, nonces), present)


# Clients that spoil sums

GROUPS = ("secure.mode=malicious-server", "federation.weighting=uniform", "secure.groups=2", "secure.liars=1")


def test_one_silent_and_one_spoiling_client_do_not_keep_ten_from_their_end(federate: Callable[..., Federation]) -> None:
    """N7. In a single sum the liar cannot be told from the others. In groups that are drawn anew in every round, it is
    soon the only one that was in all spoilt sums; the other group's sum moves the weights on meanwhile."""
    played = federate(10, *GROUPS, "rounds=30")
    lines = played.lines(10)
    lines.seconds = 1.0
    lines.clients[LIAR] = spoiling(lines.clients[LIAR])
    lines.clients[SILENT] = never_opening(lines.clients[SILENT])
    summary = played.serve(lines, least=9)
    assert summary["rounds"] == 30
    assert summary["skipped_rounds"] <= 2
    why = "spoilt sums have no other explanation if at most 1 clients lie"
    assert played.said(f"client {LIAR} is left out for 30 s:")
    assert played.said(why)
    assert played.said(f"client {SILENT} is left out for 30 s: it has not opened")
    named = {line.split()[1] for line in played.told if "is left out for" in line}
    assert named == {str(LIAR), str(SILENT)}
    played.require_agreement([client for client in range(10) if client not in (LIAR, SILENT)])


def test_a_spoilt_run_without_groups_ends_in_words(federate: Callable[..., Federation]) -> None:
    """Clients release shares about the same weights three times. One that spoils as many sums ends a run without noise,
    and in a single sum it cannot be named."""
    played = federate(6, "secure.mode=malicious-server", "federation.weighting=uniform", "rounds=9")
    lines = played.lines(6)
    lines.clients[LIAR] = spoiling(lines.clients[LIAR])
    with pytest.raises(AbortError, match=r"3 sums about .* before round 4 .*one of the clients 0-5 has spoilt them"):
        played.serve(lines)


PRIVATE = ("federation.weighting=uniform", "privacy.noise=5", "privacy.clip=1")


def test_a_private_run_goes_on_and_pays_for_spoilt_sums(federate: Callable[..., Federation]) -> None:
    played = federate(6, "secure.mode=on", *PRIVATE, "rounds=8", policy=Policy(most_epsilon=1000.0))
    lines = played.lines(6)
    lines.clients[LIAR] = spoiling(lines.clients[LIAR], most=5)
    summary = played.serve(lines)
    assert (summary["rounds"], summary["skipped_rounds"]) == (8, 5)
    assert sum(paid.count for paid in played.members[VICTIM].memory.ledger.releases()) == 8
    played.require_agreement(range(6))


def test_the_longest_time_that_a_client_is_left_out_is_a_day(federate: Callable[..., Federation]) -> None:
    """A liar comes back at once whenever it may, until it has to wait for a day. Then it is honest."""
    played = federate(5, "rounds=50", "secure.mode=on")
    lines = played.lines(5)
    lines.seconds, lines.clock.longest = 2500.0, 600_000.0
    honest, lying = lines.clients[LIAR], never_opening(lines.clients[LIAR])

    def waits_for_a_day() -> bool:
        return played.said(f"client {LIAR} is left out for {LONGEST:g} s")

    lines.clients[LIAR] = lambda asked: (honest if waits_for_a_day() else lying)(asked)
    played.serve(lines, least=4)
    assert waits_for_a_day()
    assert LIAR in played.contributors()[-1]
    assert [one.salters for one in played.statements()][-1] == tuple(range(5))


def test_a_run_waits_for_a_client_that_it_cannot_do_without(federate: Callable[..., Federation]) -> None:
    """Without the one that is left out there are too few for a sum. Rounds would be skipped one after the other."""
    played = federate(5, "rounds=4", "secure.mode=on", "secure.floor=5")
    lines = played.lines(5)
    lines.seconds = 0.1
    honest, lies = lines.clients[LIAR], list[bytes]()

    def lying_once(asked: bytes) -> bytes | None:
        told = honest(asked)
        turned = decode(told, Turned) if told and tag_of(told) == "turned" else None
        if turned is None or turned.unmasked is None or lies:
            return told
        lies.append(bytes([turned.unmasked.own[0] ^ 1]) + turned.unmasked.own[1:])
        return encode(msgspec.structs.replace(turned, unmasked=msgspec.structs.replace(turned.unmasked, own=lies[0])))

    lines.clients[LIAR] = lying_once
    played.serve(lines)
    assert played.contributors() == [set(range(5))] * 4
    assert played.said(f"client {LIAR} is left out for 30 s: in round 0 it dealt shares")
    assert lines.clock.now() > SHORTEST


# A server that says how few may lie


def test_a_server_does_not_choose_how_few_clients_lie(attack: Attack) -> None:
    """With one liar among ten, two groups of five are sound. It is not the server's to say that there is only one."""
    settings = ("secure.mode=malicious-server", "secure.groups=2", "secure.liars=1")
    server = attack(*settings, clients=10)
    server.introductions([0])  # the owner has pinned the plan
    server.victims.allow(Policy(without_privacy=True), pinned=False)
    with refused(server, 0, "secure.liars is 1 in the server's plan, least_liars asks for at least 3 of 10"):
        server.introductions([0])
    server.victims.allow(Policy(without_privacy=True, least_liars=1), pinned=False)
    server.introductions([0])
