"""A server that settles what is measured.

With a `probe.layout` of single weights it asks the same questions in every round, whatever the salt: with one client
away in the second round, the difference is what that client sends (attack N2). With tiers of its choice, one client and
those that work with the server are alone in the sum beyond some direction (attack N3).
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baffle.core.arrays import F64
from baffle.core.messages import CatchUp, Outcome, encode
from baffle.errors import PlanError
from baffle.export import export_plan
from baffle.network.member.edge import edge_equipment
from baffle.network.member.policy import Policy
from baffle.plan import Plan, change, load
from baffle.trajectory import trajectory_of
from tests.attacks.conftest import hostile_server
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


def test_an_edge_client_knows_the_layers_and_the_head_of_its_model_too(tmp_path: Path) -> None:
    export_plan("digits", tmp_path / "model", ["update.moments=layers", "probe.head=exact"])
    plan = load(str(tmp_path / "model" / "plan.toml"))
    edge_equipment(plan, tmp_path / "model", 0, part=True)
    for setting, words in (
        ("update.layers=[[0, 5994, 0, 0]]", "update.layers are not those of task.model"),
        ("probe.head_at=[0, 208, 0, 0]", "probe.head_at is"),
    ):
        with pytest.raises(PlanError, match=words):
            edge_equipment(change(plan, [setting]), tmp_path / "model", 0, part=True)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_no_client_is_alone_with_liars_beyond_some_direction(
    tmp_path: Path, tiny: Callable[..., Plan], is_pinned: bool
) -> None:
    """Two of ten work with the server, fewer than a third. The victim alone evaluates as many directions as they do."""
    plan = tiny(
        "federation.clients=10", "federation.batch=8", "federation.weighting=uniform", "secure.mode=malicious-server"
    )
    server = HostileServer(Victims(tmp_path, keys_of(tmp_path, 10), plan))
    server.plan = change(server.plan, ["federation.tiers=[{k=1, share=0.7}]"])
    server.bare = trajectory_of(server.plan, server.bare.n)
    if not is_pinned:
        for member in server.victims.members.values():
            member.consent.pinned, member.consent.policy = None, Policy(without_privacy=True)
    tiers = tuple(plan.probe.k if client in (0, 1, VICTIM) else 1 for client in server.everybody)
    with refused(server, 0, "federation.tiers"):
        statement = msgspec.structs.replace(server.statement(server.introductions(server.everybody)), tiers=tiers)
        nonces = b"".join(server.nonce(client, statement) for client in server.everybody)
        for client in server.everybody:
            server.enter(client, statement, nonces)
        view = server.view(statement, nonces)
        weights = view.present.state.weights
        mine = sum(server.own_vector(client, view, 0, weights).astype(np.int64) for client in (0, 1))
        beyond = slice(1, plan.probe.k)
        exposed = (server.play(view).astype(np.int64) - mine)[beyond] % 2**32
        assert not np.array_equal(exposed, server.own_vector(VICTIM, view, 0, weights)[beyond]), "EXPOSED"


def test_tiers_that_the_plan_does_not_name_are_refused_too(attack_in_mode: HostileServer) -> None:
    """The statement holds every client's number of directions: in this mode it is the plan's, for everybody."""
    server = attack_in_mode
    introductions = server.introductions(server.everybody)
    statement = server.statement(introductions)
    fewer = msgspec.structs.replace(statement, tiers=(1, *statement.tiers[1:]))
    with refused(server, 0, "only some clients evaluate"):
        server.nonce(0, fewer)
    assert server.nonce(0, statement)


@pytest.fixture
def attack_in_mode(tmp_path: Path, tiny: Callable[..., Plan]) -> HostileServer:
    return hostile_server(tmp_path, tiny, "secure.mode=malicious-server")
