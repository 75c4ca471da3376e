"""A server that lies to real clients learns no value of a single one of them.

Each test carries out one attack through the messages that any server can send. An attack has failed if the clients
refuse, or if what the server can compute is noise that its own checks refuse.
"""

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np
import pytest

from baffle.aggregation.messages import Hello, Opening, Turn
from baffle.core.messages import CatchUp, Contribution, Group, Outcome, RoundRequest, decode, encode
from baffle.core.ring import EXTRAS, Ring
from baffle.core.seeds import SALTED, batch_indices
from baffle.core.state import pack
from baffle.errors import MessageError
from baffle.network.member.policy import Policy
from baffle.schedule import policy_of
from tests.attacks.conftest import CLIENTS, MODES
from tests.attacks.hostile_server import HostileServer, RefusedError, View, refused

Attack = Callable[..., HostileServer]
VICTIM = 2


@pytest.mark.parametrize("mode", MODES)
def test_an_honest_round_gives_the_sum(attack: Attack, mode: str) -> None:
    """The hostile server can do what an honest one does; otherwise its failures would prove nothing."""
    server = attack(f"secure.mode={mode}")
    view = server.begin()
    total = server.play(view)
    weights = view.present.state.weights
    own = [server.own_vector(client, view, 0, weights).astype(np.int64) for client in range(CLIENTS)]
    plain = np.sum(own, axis=0)
    assert np.array_equal(total.astype(np.uint32), (plain % 2**32).astype(np.uint32))
    assert server.decoded(total, CLIENTS).contributors == CLIENTS


# Once


def test_two_runs_of_one_plan_ask_different_questions(attack: Attack) -> None:
    """The difference of two sums, of which one lacks a client, must not be that client's vector."""
    server = attack()
    first = server.begin()
    with_victim = server.play(first)
    others = [client for client in server.everybody if client != VICTIM]
    second = server.begin(others)
    without = server.play(second, others)
    own = server.own_vector(VICTIM, first, 0, first.present.state.weights)
    difference = (with_victim.astype(np.int64) - without.astype(np.int64)) % 2**32
    scalars = slice(0, server.bare.length)
    assert not np.any(difference[scalars] == own[scalars])
    for purpose in SALTED:
        keys = {view.trajectory.seeds(0).key(purpose, number) for view in (first, second) for number in range(50)}
        assert len(keys) == 100, purpose
    assert batches(first) != batches(second)


def batches(view: View) -> list[list[int]]:
    seeds = view.trajectory.seeds(0)
    return [batch_indices(lambda lap: seeds.key("batches", lap, VICTIM), 100, 8, turn).tolist() for turn in range(4)]


def test_the_same_run_is_never_asked_again(attack: Attack) -> None:
    """The same statement after a restart of everybody, with one client away."""
    server = attack()
    statement = server.statement(server.introductions(server.everybody))
    nonces = b"".join(server.nonce(client, statement) for client in server.everybody)
    for client in server.everybody:
        server.enter(client, statement, nonces)
    view = server.view(statement, nonces)
    server.play(view)
    for client in server.everybody:
        server.victims.start(client)
    others = [client for client in server.everybody if client != VICTIM]
    for client in others:
        server.nonce(client, statement)
        server.enter(client, statement, nonces)
    with pytest.raises(RefusedError):
        server.play(view, others)
    assert any("is not after slot" in line for line in server.victims.logs[0])


def test_a_round_that_was_played_is_not_asked_again_as_skipped(attack: Attack) -> None:
    """ "Round 0 was skipped": the next round asks about the same weights, but along other directions."""
    server = attack()
    view = server.begin()
    first = server.play(view)
    skipped = encode(Outcome(0, "skipped", ()))
    view.present = view.lineage.advance(view.present, skipped)
    others = [client for client in server.everybody if client != VICTIM]
    second = server.play(view, others, server.request(view, CatchUp("outcomes", 0, (skipped,))))
    own = server.own_vector(VICTIM, view, 0, view.present.state.weights)
    difference = (first.astype(np.int64) - second.astype(np.int64)) % 2**32
    assert not np.any(difference[: server.bare.length] == own[: server.bare.length])


def test_a_run_is_not_longer_than_its_statement_says(attack: Attack) -> None:
    """A client's policy bounds the rounds of a run, and so does what it agreed to."""
    server = attack("rounds=1")
    view = server.begin()
    server.play(view)
    lists = [server.victims.ask(client, Hello(1)) for client in server.everybody]
    turned = server.turned(0, Turn(None, Opening(1, server.everybody, 3, 3, tuple(lists[1:]))))
    assert turned.sealed is None
    assert any("does not sum these clients together in slot 1" in line for line in server.victims.logs[0])


def test_one_set_of_weights_is_asked_about_three_times(attack: Attack) -> None:
    """In one run or in several, whatever became of the sums."""
    server = attack()
    view = server.begin()
    items: list[bytes] = []
    for _ in range(2):
        server.play(view, request=server.request(view, CatchUp("outcomes", 0, tuple(items))))
        items.append(encode(Outcome(view.present.round, "skipped", ())))
        view.present = view.lineage.advance(view.present, items[-1])
    again = server.begin()
    server.play(again)
    last = server.begin()
    with refused(server, 0, "asked about 3 times"):
        server.play(last)


# The same weights for everybody


@pytest.mark.parametrize(
    ("kind", "why"),
    [("snapshot", "a state that nothing proves"), ("weights", "in this run clients apply outcomes themselves")],
)
def test_weights_shifted_by_one_ulp_are_refused(attack: Attack, kind: Literal["snapshot", "weights"], why: str) -> None:
    server = attack()
    view = server.begin()
    weights = view.present.state.weights.copy()
    weights[0] = np.nextafter(weights[0], np.float32(np.inf))
    shifted = replace(view.present.state, weights=weights)
    items = (pack(shifted),) if kind == "snapshot" else (weights.tobytes(),)
    chain, catch_up = view.present.chain, CatchUp(kind, 0, items)
    request = RoundRequest(0, view.trajectory.digest, chain, shifted.weights_hash(), catch_up)
    with refused(server, 0, why):
        server.play(view, request=request)


def test_one_client_with_another_past_gives_no_sum(attack: Attack) -> None:
    """The victim is told another outcome of round 0 than the rest. Each has weights that it applied itself."""
    server = attack("secure.mode=malicious-server")
    view = server.begin()
    total = server.decoded(server.play(view), CLIENTS)
    honest = encode(Outcome(0, "scalars", (Group(0, total.totals.astype("<i4").tobytes(), total.weight),)))
    lie = encode(Outcome(0, "skipped", ()))
    pasts = {client: lie if client == VICTIM else honest for client in server.everybody}
    requests = {}
    for client, item in pasts.items():
        present = view.lineage.advance(view.present, item)
        told = View(view.statement, view.data, view.lineage, view.salt, present)
        requests[client] = server.request(told, CatchUp("outcomes", 0, (item,)))
    slot = server.opened(view, server.everybody, 1)
    server.vectors(slot, slot.requests(requests))
    with pytest.raises((RefusedError, MessageError)):
        server.decoded(server.unmasked(slot, server.everybody), CLIENTS)


def test_weights_at_which_the_loss_is_not_finite_tell_nothing(attack: Attack) -> None:
    """A step within the bounds to weights so large that the loss overflows. Every client answers with a masked vector
    of the same length and weight, whatever its labels are, and the sum is skipped."""
    server = attack("update.optimizer=sgd", "update.rate=1e38", "update.ema=0")
    server.victims.allow(Policy.beside(server.victims.plan))
    view = server.begin()
    total = server.decoded(server.play(view), CLIENTS)
    item = encode(Outcome(0, "scalars", (Group(0, total.totals.astype("<i4").tobytes(), total.weight),)))
    view.present = view.lineage.advance(view.present, item)
    request = server.request(view, CatchUp("outcomes", 0, (item,)))
    slot = server.opened(view, server.everybody, 1)
    sizes = set()
    for client, asked in slot.requests(dict.fromkeys(server.everybody, request)).items():
        contribution = decode(server.victims.ask(client, asked), Contribution)
        sizes.add(len(contribution.vector))
        slot.take_vector(client, contribution.elements(), server.bare.length + EXTRAS)
    assert len(sizes) == 1
    with pytest.raises(MessageError, match="finite"):
        server.decoded(server.unmasked(slot, server.everybody), CLIENTS)


@pytest.mark.parametrize("name", ["weights_hash", "chain"])
def test_weights_have_no_second_name(attack: Attack, name: str) -> None:
    """Under another hash, or after another past, they could be asked about three times more."""
    server = attack()
    view = server.begin()
    request = msgspec.structs.replace(server.request(view), **{name: secrets.token_bytes(32)})
    with refused(server, 0, "the server's history does not match this client's replay"):
        server.play(view, request=request)


def test_an_outcome_beyond_what_clients_can_send_ends_the_part_of_a_client(
    attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights, the chain and their hashes are all as they follow from it."""
    server = attack()
    view = server.begin()
    server.play(view)
    totals = np.full(server.bare.length, 2**30, "<i4").tobytes()
    lie = encode(Outcome(0, "scalars", (Group(0, totals, CLIENTS),)))
    with monkeypatch.context() as patch:
        patch.setattr(Ring, "beyond", lambda *_: 0)
        view.present = view.lineage.advance(view.present, lie)
    slot = server.opened(view, server.everybody, 1)
    asked = slot.requests(dict.fromkeys(server.everybody, server.request(view, CatchUp("outcomes", 0, (lie,)))))
    with refused(server, VICTIM, "takes no further part in this run"):
        server.victims.ask(VICTIM, asked[VICTIM])
    with pytest.raises(RefusedError):  # not even in an honest round
        server.victims.ask(VICTIM, Hello(2))


# Masks


def test_keys_of_another_run_are_refused(attack: Attack) -> None:
    """Keys that were advertised in one run are of no use in another: they are signed with the run's name."""
    server = attack()
    first = server.begin()
    lists = {client: server.victims.ask(client, Hello(0)) for client in server.everybody}
    second = server.begin()
    policy = policy_of(second.trajectory, dict(enumerate(second.statement.tiers)), second.salt)
    members = server.everybody
    threshold = policy.least_threshold(policy.graph(members, 0), CLIENTS)
    server.victims.ask(VICTIM, Hello(0))
    others = tuple(lists[peer] for peer in members if peer != VICTIM)
    turned = server.turned(VICTIM, Turn(None, Opening(0, members, threshold, policy.floor, others)))
    assert turned.sealed is None
    assert any("are not signed by it" in line for line in server.victims.logs[VICTIM])
    assert first.run != second.run
