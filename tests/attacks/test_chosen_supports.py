"""A server that settles `probe.layout` asks the same questions in every round, whatever the salt: directions of one
weight each. With one client away in the second round, the difference is what that client sends (attack N2)."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from baffle.core.arrays import F64
from baffle.core.messages import CatchUp, Outcome, encode
from baffle.errors import PlanError
from baffle.export import export_plan
from baffle.network.member.edge import edge_equipment
from baffle.plan import Plan, change, load
from baffle.trajectory import trajectory_of
from tests.attacks.hostile_server import HostileServer, Victims, View, keys_of, refused

CLIENTS, VICTIM, K = 5, 2, 40
SETTINGS = (
    *(f"federation.clients={CLIENTS}", "federation.weighting=uniform", "ring.n_max=1", f"probe.k={K}"),
    *("probe.supports=layers", "secure.mode=on", "secure.floor=3"),
)
SINGLE_WEIGHTS = [[weight, weight + 1, 0, 0, 1] for weight in range(K)]
WITHOUT_BIASES = [[0, 640, 0, 0, K]]

Attack = Callable[..., HostileServer]


@pytest.fixture
def attack(tmp_path: Path, tiny: Callable[..., Plan]) -> Attack:
    """A hostile server that settles a layout. Its clients have pinned a plan that leaves the layout open and uses all
    samples in every round, or they have the default policy."""

    def make(layout: object = None, *, is_pinned: bool = True) -> HostileServer:
        plan = tiny(*SETTINGS, f"federation.batch={0 if is_pinned else 64}")
        server = HostileServer(Victims(tmp_path, keys_of(tmp_path, CLIENTS), plan))
        if not is_pinned:
            for member in server.victims.members.values():
                member.consent.pinned = None
        if layout:
            server.plan = change(server.plan, [f"probe.layout={layout}"])
            server.bare = trajectory_of(server.plan, server.bare.n)
        return server

    return make


def signs_of(view: View, number: int) -> F64:
    """The signs of a round's directions, which the server knows."""
    return np.array(view.trajectory.directions(number).draw(range(K), 0, 1)[:, 0], np.float64)


def slopes(server: HostileServer, view: View, clients: list[int]) -> F64:
    """Play a round with these clients, and say that it was skipped. Returns the slope of their loss along each weight
    of the layout."""
    number, skipped = view.present.round, encode(Outcome(view.present.round, "skipped", ()))
    past = tuple(encode(Outcome(before, "skipped", ())) for before in range(number))
    total = server.play(view, clients, server.request(view, CatchUp("outcomes", 0, past)))
    signs = signs_of(view, number)
    view.present = view.lineage.advance(view.present, skipped)
    return server.decoded(total, len(clients)).totals * signs


def recovered(server: HostileServer) -> tuple[F64, F64]:
    """The victim's slopes as the difference of two sums, and as it measures them itself."""
    view = server.begin()
    own = server.own_vector(VICTIM, view, 0, view.present.state.weights).view(np.int32)[:K]
    everybody, others = list(server.everybody), [client for client in server.everybody if client != VICTIM]
    return slopes(server, view, everybody) - slopes(server, view, others), own * signs_of(view, 0)


@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("layout", [SINGLE_WEIGHTS, WITHOUT_BIASES])
def test_a_server_does_not_choose_what_directions_touch(
    attack: Attack, layout: list[list[int]], is_pinned: bool
) -> None:
    server = attack(layout, is_pinned=is_pinned)
    with refused(server, 0, "is no support of task.model's layers"):
        recovered(server)


def test_the_models_own_supports_are_accepted(attack: Attack) -> None:
    server = attack()
    assert server.plan.probe.layout == ((0, 650, 0, 0, K),)
    assert np.any(recovered(server)[0])


def test_an_edge_client_knows_the_supports_of_its_model_too(tmp_path: Path) -> None:
    export_plan("digits", tmp_path / "model", ["probe.supports=layers"])
    plan = load(str(tmp_path / "model" / "plan.toml"))
    edge_equipment(plan, tmp_path / "model", 0, part=True)
    single = change(plan, [f"probe.layout={SINGLE_WEIGHTS}", f"probe.k={K}"])
    with pytest.raises(PlanError, match="is no support of"):
        edge_equipment(single, tmp_path / "model", 0, part=True)
    (*_, left_out), (*second, count), *rest = plan.probe.layout
    some = change(plan, [f"probe.layout={[[*second, count + left_out], *map(list, rest)]}"])
    with pytest.raises(PlanError, match="leaves out weights"):
        edge_equipment(some, tmp_path / "model", 0, part=True)
