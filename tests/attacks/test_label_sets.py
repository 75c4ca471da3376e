"""A server that steers the weights to where the loss of one label is not finite, by outcomes that it invents, and reads
from the clear part of a sum who holds that label (attack N1).

The net is linear. The server knows digits like those of its clients, and so which outcome lowers the logit of one label
alone. Weight decay does the rest: with a rate of 1 and a decay of 11, an outcome of zeros makes all weights ten times
larger. In the end that logit is beyond float32, and the others are not.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from baffle.core.messages import CatchUp, Group, Outcome, encode
from baffle.core.ring import EXTRAS
from baffle.network.member.policy import Policy
from baffle.plan import Plan
from tests.attacks.hostile_server import HostileServer, Victims, View, keys_of, refused

CLIENTS, LABEL, K, ROUNDS, GROWTH = 7, 3, 450, 37, 10
STEERED = (
    *(f"federation.clients={CLIENTS}", "federation.partition=dirichlet", "federation.alpha=0.1", f"probe.k={K}"),
    *("federation.floor_samples=20", "rounds=60", "secure.floor=3", "ring.d_max=1e4", "update.ema=0"),
    *("update.optimizer=sgd", "update.rate=1", f"update.weight_decay={GROWTH + 1}"),
)
OUTPUTS, PIXELS = 10, 64
LARGEST = float(np.finfo(np.float32).max)

Attack = Callable[..., HostileServer]


@pytest.fixture
def attack(tmp_path: Path, tiny: Callable[..., Plan]) -> Attack:
    """A hostile server whose clients have pinned its plan and use all samples in every round, if their mode allows
    that, or have the default policy, and their owners' word for a plan without noise."""

    def make(*settings: str, is_pinned: bool) -> HostileServer:
        is_whole = is_pinned and "secure.mode=malicious-server" not in settings
        plan = tiny(*STEERED, f"federation.batch={0 if is_whole else 8}", *settings)
        server = HostileServer(Victims(tmp_path, keys_of(tmp_path, CLIENTS), plan))
        policy = Policy.beside(plan) if is_pinned else Policy(without_privacy=True)
        server.victims.allow(policy, pinned=is_pinned)
        return server

    return make


def steered(server: HostileServer, view: View) -> tuple[bytes, ...]:
    """Invented outcomes after which the loss of samples with the label is not finite, and that of others is."""
    data = server.victims.equip(0)(server.plan).worker.data  # digits like those of the clients
    x = np.asarray(data.batch(np.arange(0, len(data), 2)).x, np.float64).reshape(-1, PIXELS)
    drawn = view.trajectory.directions(0).draw(range(K), 0, server.bare.n).astype(np.float64)
    split = OUTPUTS * PIXELS
    logits = np.stack([(x @ z[:split].reshape(OUTPUTS, PIXELS).T + z[split:]).ravel() for z in drawn])
    wanted = np.tile(np.where(np.arange(OUTPUTS) == LABEL, 1.5, 0.0), len(x))  # subtracted, then times ten 36 times
    means = np.linalg.solve(logits @ logits.T, logits @ wanted) * K * (LARGEST / GROWTH ** (ROUNDS - 1))
    totals = np.rint(means * CLIENTS * server.bare.ring.scale).astype("<i4").tobytes()
    items = list[bytes]()
    for number in range(ROUNDS):
        told = bytes(len(totals)) if number else totals
        items.append(encode(Outcome(number, "scalars", (Group(number, told, CLIENTS),))))
        view.present = view.lineage.advance(view.present, items[-1])
    return tuple(items)


def clear_part(server: HostileServer, view: View) -> list[int]:
    """What the server reads beside the totals, at weights to which it steers: ΣN, how many clients there were, how many
    values were clipped, and the loss."""
    items = steered(server, view)
    total = server.play(view, request=server.request(view, CatchUp("outcomes", 0, items)))
    return [int(extra) for extra in total.view(np.int32)[-EXTRAS:]]


@pytest.mark.parametrize("is_pinned", [True, False])
def test_no_sum_of_weights_names_the_holders_of_a_label(attack: Attack, is_pinned: bool) -> None:
    server = attack("secure.mode=on", is_pinned=is_pinned)
    workers = [server.victims.equip(client)(server.plan).worker for client in server.everybody]
    view = server.begin()
    weight, contributors, *_ = clear_part(server, view)
    assert (weight, contributors) == (sum(len(worker.indices) for worker in workers), CLIENTS)
    if is_pinned:  # the weights are where the server wants them
        own = [server.own_vector(client, view, ROUNDS, view.present.state.weights) for client in server.everybody]
        holds = [bool((worker.data.labels[worker.indices] == LABEL).any()) for worker in workers]
        assert [bool(vector[-2] == K) for vector in own] == holds
        assert 0 < sum(holds) < CLIENTS


@pytest.mark.parametrize("is_pinned", [True, False])
def test_if_a_server_may_lie_nothing_in_the_clear_depends_on_data(attack: Attack, is_pinned: bool) -> None:
    server = attack("secure.mode=malicious-server", "federation.weighting=uniform", is_pinned=is_pinned)
    assert clear_part(server, server.begin()) == [CLIENTS, CLIENTS, 0, 0]


@pytest.mark.parametrize("is_pinned", [True, False])
def test_no_weights_are_summed_where_the_server_may_lie(attack: Attack, is_pinned: bool) -> None:
    server = attack("secure.mode=malicious-server", "federation.weighting=samples", is_pinned=is_pinned)
    with refused(server, 0, 'federation.weighting = "samples" does not go with secure.mode = "malicious-server"'):
        server.begin()
