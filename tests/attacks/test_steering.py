"""A server that invents outcomes steers the weights no further than a client's owner allows."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baffle.client.replica import Reach
from baffle.core.messages import CatchUp, Group, Outcome, encode
from baffle.core.state import distance
from baffle.journal.replay import at_snapshot, follow, lineage_of
from baffle.journal.store import Journal
from baffle.network.joining import Halt
from baffle.network.member.policy import Policy
from baffle.plan import load
from baffle.simulation import simulate
from tests.attacks.conftest import MODES
from tests.attacks.hostile_server import HostileServer, View, refused

Attack = Callable[..., HostileServer]
BOLD = (
    *("update.optimizer=sgd", "update.rate=1.0", "update.ema=0.0"),
    *("ring.d_max=10000.0", "ring.n_max=1", "federation.weighting=uniform"),
)


def invent(view: View, share: float) -> tuple[bytes, float]:
    """An outcome that no client caused, of this share of what the ring holds; and how far it moves the weights."""
    most = view.trajectory.plan.group_sizes[1]
    totals = np.full(view.trajectory.length, int(share * view.trajectory.ring.most(most, most)), "<i4").tobytes()
    outcome = encode(Outcome(view.present.round, "scalars", (Group(view.present.round, totals, most),)))
    before = view.present.state.weights
    view.present = view.lineage.advance(view.present, outcome)
    return outcome, distance(before, view.present.state.weights)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_pinned", [True, False])
def test_no_invented_outcome_moves_the_weights_by_thousands(attack: Attack, mode: str, *, is_pinned: bool) -> None:
    server = attack(f"secure.mode={mode}", *BOLD)
    for member in server.victims.members.values() if not is_pinned else ():
        member.consent.pinned, member.consent.policy = None, Policy(without_privacy=True)
    view = server.begin()
    outcome, step = invent(view, 1.0)
    assert step > 1e3
    catch_up = CatchUp("outcomes", 0, (outcome,))
    with refused(server, 0, "most_step allows 10; this client takes no further part in this run"):
        server.play(view, request=server.request(view, catch_up))
    server.victims.start(0)
    statement = view.statement
    with refused(server, 0, "has left that run"):
        server.nonce(0, statement)
        server.enter(0, statement, b"".join(server.nonce(client, statement) for client in server.everybody))


def test_no_state_out_of_reach_is_signed(attack: Attack) -> None:
    server = attack(*BOLD)
    view = server.begin()
    outcome, _ = invent(view, 1.0)
    with refused(server, 0, "most_step allows"):
        server.victims.ask(0, Halt(server.request(view, CatchUp("outcomes", 0, (outcome,)))))


def test_many_small_steps_go_no_further_than_one_large_one(attack: Attack) -> None:
    """Each step keeps `most_step`; what they add up to is bounded by `most_distance`."""
    server = attack(*BOLD)
    rules = msgspec.structs.replace(Policy.beside(server.plan), most_distance=5.0)
    for member in server.victims.members.values():
        member.consent.policy = rules
    view = server.begin()
    items = []
    for _ in range(2):
        outcome, step = invent(view, 0.0008)
        assert 3 < step < 5
        items.append(outcome)
        request = Halt(server.request(view, CatchUp("outcomes", 0, tuple(items))))
        if len(items) == 1:
            server.victims.ask(0, request)
        else:
            with refused(server, 0, "most_distance allows 5"):
                server.victims.ask(0, request)


def test_the_distance_is_measured_only_when_the_steps_may_add_up_to_more() -> None:
    made = []

    def initial() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        made.append(1)
        return np.zeros(4, np.float32)

    reach, weights, at_most = Reach(1.0, 3.0, initial), np.zeros(4, np.float32), 0.0
    for there in (1, 0, 1, 0, 1, 0, 1, 0):  # back and forth: eight steps of 1, never further than 1
        after = np.full(4, there, np.float32)
        weights, at_most = after, reach.after(weights, after, at_most)
    assert len(made) == 2
    assert at_most <= 3


@pytest.mark.parametrize(
    "settings",
    [
        ("digits", "rounds=8"),
        ("digits", "rounds=8", "update.optimizer=sgd", "update.rate=1.0"),
        ("digits-crowd", "rounds=4"),
        ("dlzo-mnist", "task.data=digits", "rounds=4", "federation.clients=5", "federation.participation=1.0"),
        ("fedzo-mnist", "task.data=digits", "rounds=4", "federation.clients=5", "federation.participation=1.0"),
    ],
    ids=lambda settings: " ".join(settings[:3]),
)
def test_no_honest_run_is_out_of_reach(settings: tuple[str, ...], tmp_path: Path) -> None:
    """With room: a fifth of the defaults is enough."""
    simulate(load(settings[0], settings[1:]), tmp_path / "run")
    steps, distances = zip(*_moves(tmp_path / "run"), strict=True)
    assert 5 * max(steps) <= Policy().most_step
    assert 5 * max(distances) <= Policy().most_distance


def _moves(folder: Path) -> Iterator[tuple[float, float]]:
    with Journal.open(folder / "journal.sqlite") as journal:
        lineage = lineage_of(journal, load(str(folder / "plan.toml")))
        present = first = at_snapshot(journal, lineage, 0)
        for entry in journal.entries(0):
            before, present = present, follow(lineage, present, entry)
            here = present.state.weights
            yield distance(before.state.weights, here), distance(first.state.weights, here)
