"""A server that lies: clients sign the survivors, and release nothing until enough of them have signed the same."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from baffle.aggregation.client_policy import ClientPolicy
from baffle.aggregation.context import survivors_text
from baffle.aggregation.messages import Agree, Agreed, Unmask
from baffle.aggregation.server.slot import ServerSlot
from baffle.core.messages import Abstention, encode
from baffle.core.ring import RingVector, add
from baffle.errors import AbortError, RefusalError
from tests.support.federation import Federation, about
from tests.support.rounds import Rounds

PHASES = ["hello", "seal", "vector", "agree", "unmask"]


@pytest.fixture(autouse=True, scope="module")
def _few_keys() -> Iterator[None]:
    """Lists of keys for few slots are quicker to make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baffle.aggregation.client.session.KEYS_AT_ONCE", 8)
        yield


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


def take_agreed(federation: Federation, server: ServerSlot, signers: Iterable[int]) -> None:
    asked = server.survivors()
    for client in signers:
        server.take_agreed(client, federation.sessions[client].agree(asked), federation.directory[client])


def require_no_shares(federation: Federation, asked: Unmask, why: str = ".") -> None:
    for client in asked.alive:
        with pytest.raises(RefusalError, match=why):
            federation.sessions[client].unmask(asked)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 9])
def test_clients_that_agree_give_the_sum(n: int) -> None:
    federation = new_federation(n)
    for number in range(3):
        server, plain = federation.until_masked(about(number))
        take_agreed(federation, server, federation.everybody)
        unmask = server.unmask()
        for client in federation.everybody:
            server.take_unmasked(client, federation.sessions[client].unmask(unmask))
        assert np.array_equal(server.total(), add(list(plain.values())))


def test_just_enough_clients_in_every_phase_give_the_sum() -> None:
    """Of seven clients one seals nothing and one sends nothing; the other five are as many as t."""
    federation = new_federation(7)
    server = federation.sealed(sealing=(0, 1, 2, 3, 4, 5))
    asked = server.requests(dict.fromkeys(server.sealed, about(0)))
    plain: dict[int, RingVector] = federation.masked(server, asked, (0, 1, 2, 3, 4))
    take_agreed(federation, server, (0, 1, 2, 3, 4))
    unmask = server.unmask()
    assert (unmask.alive, unmask.dropped) == ((0, 1, 2, 3, 4), (5,))
    for client in (0, 1, 2, 3, 4):
        server.take_unmasked(client, federation.sessions[client].unmask(unmask))
    assert np.array_equal(server.total(), add(list(plain.values())))


@pytest.mark.parametrize("phase", PHASES)
def test_rounds_go_on_without_clients_that_drop(phase: str) -> None:
    """With seven clients t is 5: two may be away in any phase, and the sum is exact. A client that misses a turn misses
    the next round too."""
    rounds = Rounds(7, agreement=True)
    for number in range(6):
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


def test_a_steady_round_takes_three_exchanges() -> None:
    rounds = Rounds(4, agreement=True)
    rounds.play(0)
    rounds.play(1)
    assert [set(exchange.values()) for exchange in rounds.exchanges] == [{"vector"}, {"agree"}, {"unmask"}]


@pytest.mark.parametrize("n", range(2, 12))
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


@pytest.mark.parametrize(("n", "least"), [(3, 3), (4, 3), (5, 4), (6, 5), (9, 7), (10, 7)])
def test_a_threshold_below_two_thirds_is_refused(n: int, least: int) -> None:
    federation = new_federation(n)
    for threshold in range(least):
        with pytest.raises(RefusalError, match="threshold"):
            federation.sessions[0].seal(federation.opening(0, 0, threshold=threshold))
    federation.sessions[0].seal(federation.opening(0, 0, threshold=least))


def test_nothing_is_released_without_signatures() -> None:
    federation, server = masked(4)
    asked = server.survivors()
    require_no_shares(federation, unmask_of(asked, {}), "0 clients agreed")
    require_no_shares(federation, Unmask(0, asked.alive, asked.dropped), "0 clients agreed")


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
    bad: dict[str, tuple[tuple[int, ...], list[bytes]]] = {
        "forged": ((0, 1, 2), [*good.values(), stranger.sign(text)]),
        "zeros": ((0, 1, 2), [*good.values(), bytes(64)]),
        "doubled": ((0, 1, 1), [good[0], good[1], good[1]]),
        "under another's name": ((0, 1, 2), [good[0], good[1], good[1]]),
        "of a stranger": ((0, 1, 9), [*good.values(), stranger.sign(text)]),
        "of other survivors": (
            (0, 1, 2),
            [*good.values(), federation.sessions[2].agree(Agree(0, (0, 1, 2), (3,))).signature],
        ),
        "another run": (
            (0, 1, 2),
            [*good.values(), federation.identities[2].sign(survivors_text(bytes(32), server.context, asked.alive))],
        ),
        "another context": (
            (0, 1, 2),
            [*good.values(), federation.identities[2].sign(survivors_text(federation.run, bytes(32), asked.alive))],
        ),
        "too short": ((0, 1, 2), [*good.values(), bytes(63)]),
        "too many": ((0, 1), [*good.values(), bytes(64)]),
        "too few": ((0, 1, 2), list(good.values())),
    }
    for signers, signatures in bad.values():
        for client in asked.alive:
            with pytest.raises(RefusalError):
                federation.sessions[client].unmask(Unmask(0, asked.alive, asked.dropped, signers, b"".join(signatures)))
    good |= signed_by(federation, asked, (3,))
    federation.sessions[0].unmask(unmask_of(asked, good))


def test_the_signature_of_a_dropped_client_does_not_count() -> None:
    federation, server = masked(7, sending=(0, 1, 2, 3, 4, 5))
    asked = server.survivors()
    signatures = signed_by(federation, asked, (0, 1, 2, 3))
    signatures[6] = federation.identities[6].sign(survivors_text(federation.run, server.context, asked.alive))
    require_no_shares(federation, unmask_of(asked, signatures), "client 6 has not signed")


def test_the_signatures_of_another_round_do_not_count() -> None:
    federation, server = masked(4)
    before = signed_by(federation, server.survivors(), federation.everybody)
    again, _ = federation.until_masked(about(1))
    require_no_shares(federation, unmask_of(again.survivors(), before), "has not signed")


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
    for client in federation.everybody:
        with pytest.raises(RefusalError, match="has not signed"):
            federation.sessions[client].unmask(unmask_of(agree, signatures))


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


@pytest.mark.parametrize(
    ("alive", "dropped"),
    [
        ((0, 1, 2, 3), (3,)),
        ((0, 1, 2), ()),
        ((1, 2, 3), (0,)),
        ((0, 1), (2, 3)),
        ((0, 1, 2, 3, 4), ()),
        ((0, 2, 1, 3), ()),
        ((0, 1, 2, 2), (3,)),
    ],
)
def test_survivors_that_do_not_add_up_are_not_signed(alive: tuple[int, ...], dropped: tuple[int, ...]) -> None:
    federation, server = masked(4)
    with pytest.raises(RefusalError):
        federation.sessions[0].agree(Agree(0, alive, dropped))
    federation.sessions[0].agree(server.survivors())


def test_nothing_is_signed_before_a_vector_was_sent() -> None:
    federation = new_federation(3)
    federation.sealed()
    for number, why in ((0, "no vector"), (1, "not opened")):
        with pytest.raises(RefusalError, match=why):
            federation.sessions[0].agree(Agree(number, federation.everybody, ()))


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


def test_a_server_that_goes_on_without_signatures_aborts() -> None:
    federation, server = masked(4)
    unmask = server.unmask()
    require_no_shares(federation, unmask)
    with pytest.raises(AbortError):
        server.total()


@pytest.mark.parametrize("garbage", [b"", b"\xc1", encode(Abstention(0)), encode(Agreed(0, bytes(64), bytes(64)))])
def test_garbage_instead_of_a_signature_costs_nobody_else_the_sum(garbage: bytes) -> None:
    rounds = Rounds(4, agreement=True)
    rounds.network.spoil = lambda client, at, data: garbage if client == 1 and at == "agree" else data
    collected = rounds.play_groups(0)
    assert collected.sums[0] is not None
    assert [client for client, _ in collected.refusals] == [1]


def test_a_client_in_this_mode_releases_nothing_if_its_server_collects_no_signatures() -> None:
    """The mode is part of the client's policy; the server cannot turn it off."""
    rounds = Rounds(4, agreement=True)
    rounds.sum.policy = ClientPolicy(groups_of=rounds.policy.groups_of, threshold=3)
    total, events = rounds.play(0)
    assert total is None, events
