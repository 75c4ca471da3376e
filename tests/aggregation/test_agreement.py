"""A server that lies: clients sign the survivors, and release nothing until enough of them have signed the same."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from baffle.aggregation.client_policy import ClientPolicy
from baffle.aggregation.context import survivors_text
from baffle.aggregation.messages import Agree, Unmask
from baffle.aggregation.server.slot import ServerSlot
from baffle.errors import RefusalError
from tests.support.federation import Federation, about
from tests.support.rounds import Rounds

pytestmark = pytest.mark.usefixtures("few_keys")

PHASES = ["keys", "share", "vector", "agree", "unmask"]


def new_federation(n: int) -> Federation:
    everybody = list(range(n))
    federation = Federation(n, policy=ClientPolicy(agreement=True, groups_of=lambda _: [everybody]))
    federation.advertise()
    return federation


def masked(n: int, sending: Sequence[int] | None = None, number: int = 0) -> tuple[Federation, ServerSlot]:
    federation = new_federation(n)
    server, _ = federation.until_masked(about(number), sending=sending)
    return federation, server


def signed_by(federation: Federation, asked: Agree, signers: Iterable[int]) -> dict[int, bytes]:
    return {client: federation.sessions[client].agree(asked).signature for client in signers}


def unmask_of(asked: Agree, signatures: Mapping[int, bytes]) -> Unmask:
    return Unmask(asked.slot, asked.alive, asked.dropped, tuple(signatures), b"".join(signatures.values()))


def require_no_shares(federation: Federation, asked: Unmask, why: str = ".") -> None:
    for client in asked.alive:
        with pytest.raises(RefusalError, match=why):
            federation.sessions[client].unmask(asked)


@pytest.mark.parametrize("phase", PHASES)
def test_rounds_go_on_without_clients_that_drop(phase: str) -> None:
    """With seven clients t is 5: two may be away in any phase, and the sum is exact. A client that misses a turn misses
    the next round too."""
    rounds = Rounds(7, agreement=True)
    for number in range(4):
        away = {number % 7, (number + 3) % 7} if number % 2 else set()
        rounds.network.deaf = lambda client, at, away=away: client in away and at == phase  # type: ignore[misc]
        total, events = rounds.play(number)
        assert total is not None, events
        if phase in ("vector", "agree"):
            assert total.contributors == (5 if phase == "vector" and number % 2 else 7)


@pytest.mark.parametrize("phase", ["vector", "agree", "unmask"])
def test_one_client_too_few_in_any_phase_gives_no_sum(phase: str) -> None:
    rounds = Rounds(7, agreement=True)
    rounds.network.deaf = lambda client, at: client < 3 and at == phase
    assert rounds.play(0)[0] is None
    rounds.network.deaf = lambda _client, _phase: False
    rounds.play(1)
    assert rounds.play(2)[0] is not None


@pytest.mark.parametrize("n", [2, 3, 4, 7, 11])
def test_two_halves_that_are_told_different_survivors_release_nothing(n: int) -> None:
    """However the server divides the clients, at most one list of survivors gets enough signatures."""
    t = 2 * n // 3 + 1
    federation, server = masked(n)
    assert server.slot.opening.threshold == t
    all_alive = server.survivors()
    lie = Agree(0, all_alive.alive[:-1], all_alive.alive[-1:])
    half = federation.everybody[: n // 2], federation.everybody[n // 2 :]
    signatures = [signed_by(federation, all_alive, half[0])]
    if n - 1 >= t:
        signatures.append(signed_by(federation, lie, [client for client in half[1] if client in lie.alive]))
        require_no_shares(federation, unmask_of(lie, signatures[1]))
        require_no_shares(federation, unmask_of(lie, signatures[1] | signatures[0]))
    require_no_shares(federation, unmask_of(all_alive, signatures[0]))


@pytest.mark.parametrize("n", [4, 6, 9])
def test_a_liar_with_fewer_than_a_third_of_the_clients_gets_one_sum_at_most(n: int) -> None:
    """Clients that work for the server sign everything. Honest ones never release shares for two lists of survivors."""
    corrupt = set(range((n - 1) // 3))
    everybody = tuple(range(n))
    whole, lie = Agree(0, everybody, ()), Agree(0, everybody[:-1], everybody[-1:])
    honest = [client for client in everybody if client not in corrupt]
    released: list[set[int]] = []
    for cut in range(len(honest) + 1):
        told = {0: honest[:cut], 1: honest[cut:]}
        again, _ = masked(n)
        context = again.sessions[0]._open[0].context
        released.append(set())
        for which, asked in enumerate((whole, lie)):
            text = survivors_text(again.run, context, asked.alive)
            signatures = {client: again.identities[client].sign(text) for client in sorted(corrupt)}
            for client in told[which]:
                with suppress(RefusalError):
                    signatures |= signed_by(again, asked, [client])
            for client in honest:
                with suppress(RefusalError):
                    again.sessions[client].unmask(unmask_of(asked, signatures))
                    released[-1].add(which)
    assert {0, 1} not in released
    assert {0} in released


def test_the_threshold_follows_the_planned_group_and_not_the_members_that_the_server_names() -> None:
    """Nine clients are planned, so t is 7. Opening the slot for fewer of them does not lower it."""
    federation = new_federation(9)
    for members, threshold in (((0, 1, 2, 3, 4, 5), 5), ((0, 1, 2, 3, 4, 5, 6), 5), ((0, 1, 2, 3, 4, 5, 6, 7), 6)):
        with pytest.raises(RefusalError, match="threshold"):
            federation.sessions[0].seal(federation.opening(0, 0, members, threshold=threshold))
    assert federation.sessions[0].seal(federation.opening(0, 0, range(7), threshold=7)).slot == 0


def test_too_few_signatures_are_not_enough() -> None:
    federation, server = masked(7)
    asked = server.survivors()
    signatures = signed_by(federation, asked, (0, 1, 2, 3, 4))
    for count in range(5):
        require_no_shares(
            federation, unmask_of(asked, dict(list(signatures.items())[:count])), f"{count} clients agreed"
        )
    assert federation.sessions[6].unmask(unmask_of(asked, signatures)).slot == 0


def test_forged_doubled_foreign_and_replayed_signatures_do_not_count() -> None:
    federation, server = masked(4)
    asked = server.survivors()
    good = signed_by(federation, asked, (0, 1))
    text = survivors_text(federation.run, server.context, asked.alive)
    stranger = Ed25519PrivateKey.generate()
    signed = federation.identities[2].sign
    bad: dict[str, tuple[tuple[int, ...], bytes]] = {
        "forged": ((0, 1, 2), stranger.sign(text)),
        "doubled": ((0, 1, 1), good[1]),
        "under another's name": ((0, 1, 2), good[1]),
        "of a stranger": ((0, 1, 9), stranger.sign(text)),
        "of other survivors": ((0, 1, 2), federation.sessions[2].agree(Agree(0, (0, 1, 2), (3,))).signature),
        "another run": ((0, 1, 2), signed(survivors_text(bytes(32), server.context, asked.alive))),
        "another context": ((0, 1, 2), signed(survivors_text(federation.run, bytes(32), asked.alive))),
        "too short": ((0, 1, 2), bytes(63)),
        "too many": ((0, 1), bytes(64)),
        "too few": ((0, 1, 2), b""),
    }
    for signers, last in bad.values():
        signatures = b"".join([*good.values(), last])
        require_no_shares(federation, Unmask(0, asked.alive, asked.dropped, signers, signatures))
    good |= signed_by(federation, asked, (3,))
    federation.sessions[0].unmask(unmask_of(asked, good))
    later, _ = federation.until_masked(about(1), sending=(0, 1, 3))
    require_no_shares(federation, unmask_of(later.survivors(), good), "has not signed")  # those of another round
    fewer = signed_by(federation, later.survivors(), (0, 1))
    fewer[2] = signed(survivors_text(federation.run, later.context, (0, 1, 3)))
    require_no_shares(federation, unmask_of(later.survivors(), fewer), "client 2 has not signed")  # it dropped


def test_clients_that_were_shown_other_weights_sign_something_else() -> None:
    """Signatures cover the whole round, so theirs do not count even for the same survivors."""
    federation = new_federation(4)
    server = federation.sealed()
    other = about(0, weights_hash=bytes(32))
    asked = server.requests({client: other if client == 1 else about(0) for client in federation.everybody})
    federation.masked(server, asked, federation.everybody)
    agree = server.survivors()
    signature = federation.sessions[1].agree(agree)
    with pytest.raises(RefusalError, match="other survivors"):
        server.take_agreed(1, signature, federation.directory[1])
    signatures = signed_by(federation, agree, federation.everybody)
    require_no_shares(federation, unmask_of(agree, signatures), "has not signed")


def test_a_client_signs_one_list_of_survivors_only() -> None:
    federation, server = masked(7)
    session, first = federation.sessions[0], server.survivors()
    signature = session.agree(first)
    assert session.agree(first) == signature
    for other in (Agree(0, (0, 1, 2, 3, 4, 5), (6,)), Agree(0, (0, 1, 2, 3, 4, 6), (5,))):
        with pytest.raises(RefusalError, match="other survivors"):
            session.agree(other)
        signatures = signed_by(federation, other, (1, 2, 3, 4, 6)) if other.alive[-1] == 6 else {}
        with pytest.raises(RefusalError, match="other survivors"):
            session.unmask(unmask_of(other, signatures))
    assert session.agree(first) == signature


def test_bad_signatures_are_refused_by_the_server_too() -> None:
    federation, server = masked(4)
    asked = server.survivors()
    good = federation.sessions[0].agree(asked)
    for sender, agreed in (
        (1, good),
        (0, replace(good, slot=1)),
        (0, replace(good, signature=bytes(64))),
        (0, replace(good, signature=Ed25519PrivateKey.generate().sign(b""))),
        (0, replace(good, signature=good.state)),
        (0, replace(good, state=bytes(64))),
        (0, replace(good, state=Ed25519PrivateKey.generate().sign(b""))),
        (0, replace(good, state=good.signature)),
    ):
        with pytest.raises(RefusalError):
            server.take_agreed(sender, agreed, federation.directory[sender])
    assert not server.agreed
    assert not server.states
    server.take_agreed(0, good, federation.directory[0])
    server.take_agreed(0, good, federation.directory[0])


def test_a_client_in_this_mode_releases_nothing_if_its_server_collects_no_signatures() -> None:
    """The mode is part of the client's policy; the server cannot turn it off."""
    rounds = Rounds(4, agreement=True)
    rounds.sum.policy = ClientPolicy(groups_of=rounds.policy.groups_of, threshold=3)
    total, events = rounds.play(0)
    assert total is None, events
