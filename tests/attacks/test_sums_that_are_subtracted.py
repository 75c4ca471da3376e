"""A server that subtracts sums over changing survivors, and one that chooses the model or the weights.

Directions follow from a salt that no server chooses, but as many of them as there are weights measure the whole
gradient, whatever they are: with one client away in the second round, the difference of two sums is that client's own
gradient (the rest of attack N2). With fewer directions the same happens over more rounds. Only noise bounds that, and
it also bounds what a model or weights that were made to ask questions get out of a sum (attack N4).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from baffle.client.worker import Worker
from baffle.core.arrays import F32, F64
from baffle.core.messages import CatchUp, Group, Outcome, encode
from baffle.core.ports import Batch
from baffle.errors import PlanError
from baffle.export import export_plan
from baffle.network.member.consent import EXPOSED
from baffle.network.member.equipment import Equip, Equipment, with_onnx
from baffle.network.member.policy import Policy
from baffle.network.settling import require_fewer_directions_than_weights, require_sound_terms
from baffle.plan import Plan, change
from baffle.plan.privacy import with_noise
from baffle.plan.sections import LARGEST
from baffle.runtime.onnx.model_folder import MANIFEST
from baffle.trajectory import trajectory_of
from tests.attacks.hostile_server import PLANS_OWN, HostileServer, Victims, View, keys_of, refused
from tests.attacks.test_lying_models import PIXELS, brighter_than, hand_out

CLIENTS, VICTIM, WEIGHTS = 5, 2, 650
FEW, MANY, ENOUGH = 100, 200, 1000  # directions: for the 64 weights that a hostile model uses, and for all
SETTINGS = (
    *(f"federation.clients={CLIENTS}", "federation.weighting=uniform", "ring.n_max=1", "federation.batch=64"),
    *("probe.distribution=gaussian", "probe.scheme=central", "secure.mode=malicious-server", "secure.floor=3"),
    *("task.init=numpy", "rounds=6"),
)
PRIVATE = ("privacy.epsilon=8", "privacy.clip=20.0")
RATHER_BRIGHT = 4.0  # the pixels of a quarter of all digits add up to more, so every batch has some


@pytest.fixture(autouse=True)
def _same_nonces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directions and batches follow from clients' nonces. Here they are the same every time."""
    numbers = count()
    monkeypatch.setattr("secrets.token_bytes", lambda size: next(numbers).to_bytes(size, "big"))


def seeded(equip: Callable[[int], Equip]) -> Callable[[int], Equip]:
    """Clients whose noise is the same every time."""

    def at(number: int) -> Equip:
        noise = np.random.default_rng(number).bytes

        def equipped(plan: Plan, most_weights: int = LARGEST) -> Equipment:
            made = equip(number)(plan, most_weights)
            return made._replace(worker=replace(made.worker, random=noise))

        return equipped

    return at


Attack = Callable[..., HostileServer]


@pytest.fixture
def attack(tmp_path: Path, tiny: Callable[..., Plan]) -> Attack:
    """A hostile server. Its clients have pinned the plan, or they have a policy."""

    def make(*settings: str, policy: Policy | None = None, equip: Callable[[int], Equip] = PLANS_OWN) -> HostileServer:
        plan = tiny(*SETTINGS, *settings)
        server = HostileServer(Victims(tmp_path, keys_of(tmp_path, CLIENTS), plan, equip=seeded(equip)))
        for member in server.victims.members.values() if policy else ():
            member.consent.pinned, member.consent.policy = None, policy
        return server

    return make


def solved(totals: Sequence[int], view: View, number: int, weights: int = WEIGHTS) -> F64:
    """The gradient along the first weights that was measured by a round's directions, which the server knows."""
    directions = view.trajectory.directions(number)
    moved = directions.draw(range(len(totals)), 0, weights) * directions.distribution.unit
    found: F64 = np.linalg.lstsq(moved, np.array(totals, np.float64), rcond=None)[0]
    return found


def measured(server: HostileServer, view: View, clients: list[int], weights: int = WEIGHTS) -> F64:
    """Play a round with these clients, and say that it was skipped, so that the next is about the same weights."""
    number = view.present.round
    past = tuple(encode(Outcome(before, "skipped", ())) for before in range(number))
    total = server.play(view, clients, server.request(view, CatchUp("outcomes", 0, past)))
    view.present = view.lineage.advance(view.present, encode(Outcome(number, "skipped", ())))
    return solved(server.decoded(total, len(clients)).totals.tolist(), view, number, weights)


def cosine(a: F64, b: F64) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def workers(server: HostileServer, view: View) -> list[Worker]:
    """What the clients compute with in the first round."""
    equipped = [server.victims.equip(client)(server.plan).worker for client in server.everybody]
    return [replace(worker, trajectory=view.trajectory) for worker in equipped]


def gradient(weights: F32, batch: Batch) -> F64:
    """The true gradient of softmax regression."""
    pixels = batch.x.reshape(-1, PIXELS).astype(np.float64)
    logits = pixels @ weights[:-10].reshape(10, PIXELS).T + weights[-10:]
    likely = np.exp(logits - logits.max(axis=1, keepdims=True))
    wrong = (likely / likely.sum(axis=1, keepdims=True) - np.eye(10)[batch.y]) / len(pixels)
    return np.concatenate([(wrong.T @ pixels).ravel(), wrong.sum(axis=0)])


# Subtraction


def subtracted(server: HostileServer) -> float:
    """The cosine of the victim's own gradient with the difference of a sum with it and one without it."""
    view = server.begin()
    own = gradient(view.present.state.weights, workers(server, view)[VICTIM].batch_of_round(0))
    everybody, others = list(server.everybody), [client for client in server.everybody if client != VICTIM]
    return cosine(measured(server, view, everybody) - measured(server, view, others), own)


def test_no_sums_without_noise_measure_a_clients_whole_gradient(attack: Attack) -> None:
    """Before this was refused, two sums gave it: a cosine of 0.99999 with the same samples in both."""
    server = attack(f"probe.k={ENOUGH}")
    with refused(server, 0, f"{ENOUGH} directions of a round touch only the {WEIGHTS} weights from 0 to {WEIGHTS}"):
        subtracted(server)


def test_no_exact_head_without_noise_where_the_server_may_lie(attack: Attack) -> None:
    """Softmax regression is a head alone: every sum would be the exact gradient of its clients."""
    server = attack("probe.head=exact")
    with refused(server, 0, 'probe.head = "exact" does not go with secure.mode = "malicious-server"'):
        server.begin()


def test_the_same_samples_in_every_round_are_refused_where_the_server_may_lie(attack: Attack) -> None:
    server = attack(f"probe.k={FEW}", "federation.batch=0")
    with refused(server, 0, "federation.batch is 0 in the server's plan, so a round uses all samples"):
        server.begin()
    with pytest.raises(PlanError, match="batch = 0 does not go with"):
        require_sound_terms(server.plan)


def over_rounds(server: HostileServer, view: View, clients: list[int], rounds: int, told: list[bytes]) -> F64:
    """The gradient that several rounds measure together, at weights that hardly move."""
    drawn, totals, scale = list[F64](), list[F64](), server.bare.ring.scale
    for _ in range(rounds):
        number = view.present.round
        total = server.play(view, clients, server.request(view, CatchUp("outcomes", 0, tuple(told))))
        directions = view.trajectory.directions(number)
        drawn.append(directions.draw(range(MANY), 0, WEIGHTS).astype(np.float64) * directions.distribution.unit)
        totals.append(server.decoded(total, len(clients)).totals / scale)
        told.append(encode(Outcome(number, "scalars", (Group(number, b"\0\0\x10\0" * MANY, len(clients)),))))
        view.present = view.lineage.advance(view.present, told[-1])
    found: F64 = np.linalg.lstsq(np.concatenate(drawn), np.concatenate(totals), rcond=None)[0]
    return found


@pytest.mark.parametrize("mode", ["on", "malicious-server"])
def test_rounds_of_a_batch_that_is_larger_than_any_client_do_not_measure_all_its_samples(
    attack: Attack, mode: str
) -> None:
    """Such a batch is another name for batch = 0. The owner's policy allows all samples, and no noise."""
    slow = ("update.optimizer=sgd", "update.rate=1e-5", "update.ema=0", "rounds=12")
    policy = Policy(without_privacy=True, largest_batch=1.0)
    server = attack(f"probe.k={MANY}", "federation.batch=5000", f"secure.mode={mode}", *slow, policy=policy)
    view = server.begin()
    worker = workers(server, view)[VICTIM]
    own = gradient(view.present.state.weights, worker.data.batch(worker.indices))
    everybody, others = list(server.everybody), [client for client in server.everybody if client != VICTIM]
    told = list[bytes]()
    found = over_rounds(server, view, everybody, 4, told) - over_rounds(server, view, others, 4, told)
    assert (cosine(found, own) > 0.999) == (mode == "on")


def test_what_was_loaded_in_another_mode_is_judged_anew(attack: Attack) -> None:
    """The same plan in mode "on" first, so that its samples and its model are loaded."""
    server = attack(f"probe.k={ENOUGH}", "secure.mode=on", policy=Policy(without_privacy=True))
    server.begin()
    server.plan = change(server.plan, ["secure.mode=malicious-server"])
    server.bare = trajectory_of(server.plan, WEIGHTS)
    with refused(server, 0, "so a sum measures these exactly"):
        server.begin()


def test_two_sums_with_enough_directions_are_the_victims_gradient_where_nothing_forbids_it(attack: Attack) -> None:
    assert subtracted(attack(f"probe.k={ENOUGH}", "federation.batch=0", "secure.mode=on")) > 0.9999


def test_the_default_policy_takes_part_in_no_such_plan_without_noise(attack: Attack) -> None:
    """Before, two sums of a plan within the default policy gave a cosine of 0.52 with the victim's gradient."""
    server = attack(f"probe.k={FEW}", policy=Policy())
    with refused(server, 0, "the server's plan has no [privacy]"):
        server.begin()


@pytest.mark.parametrize("policy", [Policy(without_privacy=True), None], ids=["policy", "pinned"])
def test_an_owner_who_allows_it_is_told_what_it_gives_away(attack: Attack, policy: Policy | None) -> None:
    server = attack(f"probe.k={FEW}", policy=policy)
    server.play(server.begin())
    assert server.victims.logs[0].index(EXPOSED) == 0


def test_an_owner_who_allows_it_is_protected_from_exact_measurements_all_the_same(attack: Attack) -> None:
    server = attack(f"probe.k={ENOUGH}", policy=Policy(without_privacy=True))
    with refused(server, 0, "so a sum measures these exactly"):
        server.begin()


def test_noise_hides_a_client_in_the_difference_of_two_sums(attack: Attack) -> None:
    """However many directions: with noise nothing forbids them."""
    assert abs(subtracted(attack(f"probe.k={ENOUGH}", *PRIVATE, policy=Policy()))) < 0.5


# A budget where the server may lie


def test_too_little_noise_is_refused_by_the_usual_budget(attack: Attack) -> None:
    server = attack(f"probe.k={FEW}", "privacy.noise=1e-3", "privacy.clip=1.0", policy=Policy())
    with refused(server, 0, "this client's budget is spent"):
        server.begin()


@pytest.mark.parametrize("epsilon", [2, 20])
def test_a_pinned_plan_is_paid_for_once(attack: Attack, epsilon: int) -> None:
    """Its own rounds may cost what it says, or 8 if that is more."""
    server = attack(f"probe.k={FEW}", f"privacy.epsilon={epsilon}", "privacy.clip=1.0", "rounds=2")
    budgets = [member.consent.charge(server.bare) for member in server.victims.members.values()]
    assert {round(charge.budget.epsilon, 1) for charge in budgets if charge and charge.budget} == {max(8, epsilon)}
    for _ in range(2):
        view = server.begin()
        measured(server, view, list(server.everybody), PIXELS)
        if epsilon == 2:
            continue
        measured(server, view, list(server.everybody), PIXELS)
        with refused(server, 0, "this client's budget is spent"):
            server.begin()
        return


# A model and weights that ask questions


@pytest.mark.parametrize("noise", [(), PRIVATE])
def test_noise_hides_the_pixels_that_an_approved_graph_asks_for(
    tmp_path: Path, tiny_toml: Path, attack: Attack, noise: tuple[str, ...]
) -> None:
    """N4 with the owner's approval. Only the 64 weights that the graph uses are unknown, so few directions suffice."""
    export_plan(str(tiny_toml), tmp_path / "honest", [*SETTINGS, f"probe.k={FEW}"])
    model = hand_out(tmp_path / "honest", tmp_path / "model", brighter_than(RATHER_BRIGHT))
    sha = sha256((model / MANIFEST).read_bytes()).hexdigest()
    named = (f"probe.k={FEW}", 'task.model={name="onnx"}', f'run.model="{model}"', "task.init=")
    equip = partial(with_onnx, data=None, model=model, part=True, approved=[sha])
    server = attack(*named, *noise, *(("privacy.clip=0.1",) if noise else ()), equip=equip)
    view = server.begin()
    batches = [worker.batch_of_round(0).x.reshape(-1, PIXELS) for worker in workers(server, view)]
    shown = np.sum([(x * (x.sum(axis=1, keepdims=True) > RATHER_BRIGHT)).mean(axis=0) for x in batches], axis=0)
    likeness = cosine(measured(server, view, list(server.everybody), PIXELS), shown.astype(np.float64))
    assert abs(likeness) < 0.8 if noise else likeness > 0.999


@pytest.mark.parametrize("noise", [("secure.mode=on",), PRIVATE])
def test_noise_hides_what_trap_weights_ask_for(attack: Attack, noise: tuple[str, ...]) -> None:
    """With a bias that rules a class out, the gradient of its weights is the sum of all pixels of its samples. A server
    chooses such weights if it hands them out, or steers there by outcomes that it invents."""
    trap = np.zeros(WEIGHTS, np.float32)
    trap[-1] = -50

    def equip(number: int) -> Equip:
        return lambda plan, most=LARGEST: PLANS_OWN(number)(plan, most)._replace(initial=lambda: trap)

    server = attack(f"probe.k={ENOUGH}", *noise, equip=equip)
    server.state = server.bare.rule.start(trap)
    view = server.begin()
    batches = [worker.batch_of_round(0) for worker in workers(server, view)]
    nines = np.sum([batch.x[batch.y == 9].reshape(-1, PIXELS).sum(axis=0) for batch in batches], axis=0)
    found = -measured(server, view, list(server.everybody))[9 * PIXELS : 10 * PIXELS]
    likeness = cosine(found, nines.astype(np.float64))
    assert abs(likeness) < 0.8 if noise == PRIVATE else likeness > 0.999


# Small supports


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("probe.k=649",), ""),
        (("probe.k=650",), "650 directions of a round touch only the 650 weights"),
        (("probe.k=650", *PRIVATE), ""),
        (("probe.k=650", "secure.mode=on"), ""),
        (
            ("probe.k=40", "probe.supports=layers", "probe.layout=[[0,20,0,0,20],[20,650,0,0,20]]"),
            "20 directions .* the 20 weights from 0 to 20",
        ),
        (("probe.k=40", "probe.supports=layers", "probe.layout=[[0,20,0,0,19],[20,650,0,0,21]]"), ""),
        (
            ("probe.k=40", "probe.supports=units", "probe.layout=[[0,9,18,19,10],[9,18,19,20,30]]"),
            "30 directions .* the 10 weights",
        ),
        (("probe.k=21", "probe.supports=units", "probe.layout=[[0,9,18,19,9],[0,20,0,0,12]]"), "21 directions"),
    ],
)
def test_a_part_of_the_weights_has_fewer_directions_than_weights(
    tiny: Callable[..., Plan], settings: tuple[str, ...], words: str
) -> None:
    plan = tiny(*SETTINGS, *settings)
    trajectory = trajectory_of(with_noise(plan, WEIGHTS), WEIGHTS)
    if words:
        with pytest.raises(PlanError, match=words):
            require_fewer_directions_than_weights(trajectory)
    else:
        require_fewer_directions_than_weights(trajectory)


@pytest.mark.parametrize("settings", [["federation.level=epoch"], ["federation.seeds=own"], ["estimator=backprop"]])
def test_clients_send_no_vectors_where_the_server_may_lie(tiny: Callable[..., Plan], settings: list[str]) -> None:
    with pytest.raises(PlanError, match="whose clients send vectors is refused"):
        require_sound_terms(tiny(*SETTINGS, *settings))
    require_sound_terms(tiny(*SETTINGS, *settings, "secure.mode=on"))
