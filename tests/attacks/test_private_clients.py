"""A server that wants more out of private clients than their noise allows: more rounds, more runs, less noise, or the
same answer under two noises. Clients count by themselves, on their own disks."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from baffle.aggregation.client.marks import MarksFile
from baffle.aggregation.messages import MaskedRequest
from baffle.client.worker import Worker
from baffle.core.messages import CatchUp, Outcome, encode
from baffle.errors import PlanError, RunFolderError
from baffle.network.joining import Begin
from baffle.network.member.equipment import Equipment, with_plan
from baffle.network.member.member import Member
from baffle.network.member.policy import Policy
from baffle.network.settling import require_sound_terms
from baffle.plan import Plan, change
from baffle.plan.sections import LARGEST
from baffle.privacy.accounting import spent
from baffle.trajectory import trajectory_of
from tests.attacks.hostile_server import HostileServer, RefusedError, Victims, View, keys_of, refused

CLIENTS, VICTIM, DELTA = 5, 2, 1e-5
FIXED = (
    *("federation.clients=5", "federation.batch=8", "federation.weighting=uniform", "ring.n_max=1", "rounds=6"),
    *("secure.mode=on", "secure.floor=4", "privacy.noise=2.0", "privacy.clip=1.0"),
)

Attack = Callable[..., HostileServer]


@pytest.fixture
def attack(tmp_path: Path, tiny: Callable[..., Plan]) -> Attack:
    """A hostile server with five clients that have pinned a private plan, and a policy if one is given."""

    def make(*settings: str, policy: Policy | None = None) -> HostileServer:
        return HostileServer(Victims(tmp_path, keys_of(tmp_path, CLIENTS), tiny(*FIXED, *settings), policy))

    return make


def enough_for(rounds: int, *, noise: float = 2.0) -> Policy:
    """A policy whose budget pays for so many vectors with that noise, and for no more."""
    first, last = (_gaussian(count, noise) for count in (rounds, rounds + 1))
    return Policy(least_batch=0, largest_batch=1.0, most_epsilon=(first + last) / 2, delta=DELTA)


def _gaussian(rounds: int, noise: float) -> float:
    orders = np.arange(2, 2000)
    divergence = rounds * orders / (2 * noise**2)
    return float(np.min(divergence + np.log1p(-1 / orders) - (math.log(DELTA) + np.log(orders)) / (orders - 1)))


def charged(server: HostileServer, client: int) -> int:
    """How many vectors a client has paid for, as its disk says."""
    return sum(release.count for release in MarksFile(server.victims.keys[client].marks).ledger.releases())


def play_and_skip(server: HostileServer, view: View, skipped: list[bytes]) -> None:
    """Play a round, and say afterwards that it was skipped."""
    server.play(view, request=server.request(view, CatchUp("outcomes", 0, tuple(skipped))))
    skipped.append(encode(Outcome(view.present.round, "skipped", ())))
    view.present = view.lineage.advance(view.present, skipped[-1])


def test_an_honest_round_gives_a_sum_with_its_noise_and_charges_everybody(attack: Attack) -> None:
    server = attack()
    view = server.begin()
    total = server.decoded(server.play(view), CLIENTS)
    assert (total.contributors, total.weight, total.loss) == (CLIENTS, CLIENTS, None)
    assert [charged(server, client) for client in server.everybody] == [1] * CLIENTS
    private = server.bare.private
    assert private is not None
    ledger = MarksFile(server.victims.keys[VICTIM].marks).ledger
    assert ledger.epsilon(DELTA) == spent([private.release], DELTA) == pytest.approx(_gaussian(1, 2.0), rel=1e-3)


# A budget over all runs


def test_a_plan_that_is_run_again_and_again_meets_an_empty_purse(attack: Attack) -> None:
    """Also by a server that has deleted its folder, and whose run has another name every time."""
    server = attack(policy=enough_for(2))
    for _ in range(2):
        HostileServer(server.victims).play(server.begin())
    with refused(server, 0, "this client's budget is spent"):
        server.begin()
    assert [charged(server, client) for client in server.everybody] == [2] * CLIENTS


def test_a_budget_that_ends_within_a_run_stays_spent_after_a_restart(attack: Attack) -> None:
    server = attack(policy=enough_for(2))
    view, skipped = server.begin(), list[bytes]()
    for _ in range(2):
        play_and_skip(server, view, skipped)
    with refused(server, 0, "this client's budget is spent"):
        play_and_skip(server, view, skipped)
    server.victims.start(0)
    with refused(server, 0, "this client's budget is spent"):
        server.begin()
    assert charged(server, 0) == 2


def test_vectors_whose_sums_are_never_made_are_paid_for_all_the_same(attack: Attack) -> None:
    server = attack()
    view = server.begin()
    slot = server.opened(view, server.everybody, 0)
    server.vectors(slot, slot.requests(dict.fromkeys(server.everybody, server.request(view))))
    assert [charged(server, client) for client in server.everybody] == [1] * CLIENTS


def test_other_plans_are_paid_for_from_the_same_purse(attack: Attack) -> None:
    """More noise costs less, and all of it adds up."""
    server = attack(policy=enough_for(1))
    server.play(server.begin())
    victims = server.victims
    victims.plan = change(victims.plan, ["privacy.noise=40.0", "seed=5"])
    for client in server.everybody:
        victims.start(client)
    dearer = HostileServer(victims)
    dearer.play(dearer.begin())
    assert len(MarksFile(victims.keys[VICTIM].marks).ledger.releases()) == 2


def test_a_client_with_a_budget_takes_part_in_no_run_without_noise(attack: Attack) -> None:
    server = attack("privacy.noise=0", "privacy.clip=0", policy=enough_for(2))
    with refused(server, 0, "the server's plan has no [privacy], most_epsilon asks for it"):
        server.begin()


def test_a_client_whose_ledger_was_wiped_does_not_start(attack: Attack) -> None:
    server = attack(policy=enough_for(1))
    server.play(server.begin())
    server.victims.keys[VICTIM].marks.unlink()
    with pytest.raises(RunFolderError, match="is missing: it was made together with this client's key"):
        server.victims.start(VICTIM)


@pytest.mark.parametrize("rounds", [0, 1])
def test_an_older_ledger_is_noticed_in_a_run_that_goes_on(attack: Attack, rounds: int) -> None:
    """An empty file looks like that of a new key, and a copy of an earlier round like that round; but an honest server
    says what this client has answered before. Nothing else can notice an older copy."""
    server, skipped = attack(), list[bytes]()
    view = server.begin()
    marks = server.victims.keys[VICTIM].marks
    for _ in range(rounds):
        play_and_skip(server, view, skipped)
    copy = marks.read_bytes() if rounds else b""
    play_and_skip(server, view, skipped)
    marks.write_bytes(copy)
    server.victims.start(VICTIM)
    with refused(server, VICTIM, "its marks do not say so"):
        server.victims.ask(VICTIM, Begin(view.data, (), answered=rounds + 1))


def test_two_processes_with_one_key_do_not_spend_the_budget_twice(attack: Attack) -> None:
    """On two machines with one disk, where the lock of a folder may hold nobody up. The one that has paid goes on."""
    server = attack(policy=enough_for(2))
    view, skipped, first = server.begin(), list[bytes](), server.victims.members[VICTIM]
    second = server.victims.start(VICTIM)
    server.victims.members[VICTIM] = first
    play_and_skip(server, view, skipped)
    server.victims.members[VICTIM] = second
    with refused(server, VICTIM, "changed by another process or put back from a copy"):
        HostileServer(server.victims).begin()
    server.victims.members[VICTIM] = first
    play_and_skip(server, view, skipped)
    assert charged(server, VICTIM) == 2
    with refused(server, 0, "this client's budget is spent"):
        play_and_skip(server, view, skipped)


# Once


def asked_first(server: HostileServer) -> MaskedRequest:
    """What the victim is asked in the first round."""
    view = server.begin()
    slot = server.opened(view, server.everybody, 0)
    return slot.requests(dict.fromkeys(server.everybody, server.request(view)))[VICTIM]


def test_an_answer_that_is_asked_for_again_has_the_same_noise_and_costs_once(attack: Attack) -> None:
    server = attack()
    request = asked_first(server)
    first, second = (server.victims.ask(VICTIM, request) for _ in range(2))
    assert first == second
    assert charged(server, VICTIM) == 1


@pytest.mark.parametrize("restarted", [True, False])
def test_an_answer_that_was_lost_in_a_crash_is_never_given_with_other_noise(
    attack: Attack, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    server = attack()
    request = asked_first(server)
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "vector", Mock(side_effect=OSError("the battery is empty")))
        with pytest.raises(RefusedError):
            server.victims.ask(VICTIM, request)
    if restarted:
        server.victims.start(VICTIM)
    with pytest.raises(RefusedError):
        server.victims.ask(VICTIM, request)
    assert charged(server, VICTIM) == 1


# Less noise than a client asks for


def lying(server: HostileServer, *settings: str) -> HostileServer:
    """The same server, which now offers its plan with other settings, also some that BAFFLE's own server refuses."""
    text = server.plan.to_toml()
    for setting in settings:
        key, value = setting.split("=")
        old = next(line for line in text.split("[privacy]")[1].splitlines() if line.startswith(f"{key} ="))
        text = text.replace(old, f"{key} = {value}")
    server.plan = _Written(text)  # type: ignore[assignment]
    return server


@dataclass
class _Written:
    """A plan as a text that nobody has checked."""

    text: str

    def to_toml(self) -> str:
        return self.text


def test_less_noise_than_the_policy_asks_for_is_refused(attack: Attack) -> None:
    server = attack(policy=Policy(least_batch=0, largest_batch=1.0, least_noise=3.0))
    with refused(server, 0, "privacy.noise is 2 in the server's plan, least_noise asks for at least 3"):
        server.introductions([0])


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("noise=1.0", "privacy.noise is 1.0 there and 2.0 here"),
        ("clip=50.0", "privacy.clip is 50.0 there and 1.0 here"),
        ("delta=0.1", "privacy.delta is 0.1 there and 0.00001 here"),
        ("noise=0.0", "privacy"),
    ],
)
def test_other_noise_or_clipping_than_in_the_pinned_plan_is_refused(attack: Attack, lie: str, words: str) -> None:
    server = lying(attack(), lie)
    with refused(server, 0, words):
        server.introductions([0])


def test_parts_of_the_noise_too_small_for_the_survivors_are_refused(attack: Attack) -> None:
    """With four survivors at least, a fifth of the noise from each is too little."""
    server = lying(attack(), "sharers=5")
    with refused(server, 0, "privacy.sharers: expected at most 4"):
        server.introductions([0])


def test_a_target_that_the_noise_does_not_reach_is_refused(attack: Attack) -> None:
    """The client counts by itself: six rounds with this noise cost more than the ε that the plan claims."""
    server = attack("privacy.noise=0", "privacy.epsilon=4")
    server.introductions([0])
    noise = server.plan.privacy.noise
    with refused(lying(server, f"noise={noise / 2}"), 0, "come to ε ="):
        server.introductions([0])


def test_a_client_counts_by_itself_whatever_equips_it(attack: Attack) -> None:
    """On the edge nothing else looks at what a plan promises."""
    server = attack("privacy.noise=0", "privacy.epsilon=4")
    victims, equipped = server.victims, with_plan(0, None, part=True)(server.plan)

    def equip(plan: Plan, _most_weights: int = LARGEST) -> Equipment:
        trajectory = trajectory_of(plan, equipped.worker.trajectory.n)
        return equipped._replace(worker=replace(equipped.worker, trajectory=trajectory))

    tell = victims.logs[0].append
    victims.members[0] = Member(victims.keys[0], None, equip, pinned=victims.plan, tell=tell)
    server.introductions([0])
    noise = server.plan.privacy.noise
    with refused(lying(server, f"noise={noise / 2}"), 0, "come to ε ="):
        server.introductions([0])


def test_a_target_is_refused_for_more_rounds_than_it_is_for(attack: Attack) -> None:
    server = attack("privacy.noise=0", "privacy.epsilon=4")
    text = server.plan.to_toml().replace("rounds = 6", "rounds = 60")
    server.plan = _Written(text)  # type: ignore[assignment]
    with refused(server, 0, "60 rounds with noise"):
        server.introductions([0])


def test_a_private_run_without_the_secure_sum_is_refused(attack: Attack) -> None:
    server = attack("secure.mode=off")
    with refused(server, 0, "voids [privacy] in a network"):
        server.begin()
    with pytest.raises(PlanError, match="voids"):
        require_sound_terms(server.plan)
