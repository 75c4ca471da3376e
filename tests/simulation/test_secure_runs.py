"""Whole runs with the secure sum, whose clients drop, abstain, come back, or lose messages."""

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from baffle.aggregation.messages import Hello, MaskedRequest, Request, Turn, Unmask
from baffle.core.messages import Abstention, Message, Reply, RoundRequest, decode_reply, encode
from baffle.core.ports import CONTRIBUTED, MISSING
from baffle.core.ring import LOSS_MAX
from baffle.core.seeds import Seeds
from baffle.data.partition import iid
from baffle.errors import BaffleError, PlanError
from baffle.journal.audit import verify
from baffle.plan import Plan
from baffle.schedule import choose_clients, choose_groups, policy_of
from baffle.server.round import open_round
from baffle.simulation import drops, resume, simulate
from baffle.task.load import load_task
from baffle.trajectory import trajectory_of
from tests.support.rounds_by_hand import RoundsByHand
from tests.support.watched_runs import records_of

MakePlan = Callable[..., Plan]

BACKPROP = ['estimator="backprop"']


@pytest.fixture
def plan(tiny: MakePlan) -> MakePlan:
    """The tiny plan with a secure sum over five clients, changed by further settings."""
    return lambda *settings: tiny("federation.clients=5", 'secure.mode="on"', *settings)


def _events(run: Path) -> dict[tuple[int, int], str]:
    """The journal's event for each round and client."""
    db = sqlite3.connect(run / "journal.sqlite")
    rows = db.execute("SELECT round, client, event FROM participation").fetchall()
    db.close()
    return {(number, client): event for number, client, event in rows}


def test_messages_are_counted_per_client_of_the_round_not_per_client_reached(plan: MakePlan, tmp_path: Path) -> None:
    """The exchange that ends a round also opens the next one, whose clients may differ."""
    simulate(plan("federation.clients=10", "federation.participation=0.4", "rounds=4"), tmp_path / "run")
    for record in records_of(tmp_path / "run"):
        assert record["replies"] == 4
        assert record["requests"] + record["joins"] == 4


@pytest.mark.parametrize("settings", [["run.downlink=delta"], [*BACKPROP, "secure.floor=4"]])
def test_a_round_with_too_few_survivors_is_skipped_and_the_run_continues(
    plan: MakePlan, tmp_path: Path, settings: list[str]
) -> None:
    changed = plan("federation.dropout=0.4", "rounds=9", *settings)
    summary = simulate(changed, tmp_path / "run")
    trajectory = trajectory_of(load_task(changed).plan, 650)
    survivors = [5 - sum(drops(trajectory, number, client) for client in range(5)) for number in range(9)]
    expected = [alive if alive >= changed.secure.floor else 0 for alive in survivors]
    records = records_of(tmp_path / "run")
    assert [record["contributors"] for record in records] == expected
    assert [record["loss"] is None for record in records] == [count == 0 for count in expected]
    assert summary["skipped_rounds"] == expected.count(0) == verify(tmp_path / "run").skipped
    assert any(not before and 0 < after < 5 for before, after in pairwise(expected))
    assert (summary["secure"], summary["dropouts"]) == ("on", sum(5 - alive for alive in survivors))
    for (number, client), event in _events(tmp_path / "run").items():
        if drops(trajectory, number, client):
            assert event == MISSING
        elif expected[number]:
            assert event == CONTRIBUTED
        else:
            assert f"{survivors[number]} of 5 clients sent a vector, too few" in event
    assert summary["forwards"] == sum(expected) * (1 if BACKPROP[0] in settings else 5)


def test_dropouts_depend_on_neither_probe_nor_participation_and_are_fewer_at_a_lower_rate(plan: MakePlan) -> None:
    def dropouts(*settings: str) -> set[tuple[int, int]]:
        trajectory = trajectory_of(plan("ring.n_max=20", *settings), 5)
        return {(n, client) for n in range(200) for client in range(5) if drops(trajectory, n, client)}

    assert dropouts() == set()
    fewer, more = dropouts("federation.dropout=0.2"), dropouts("federation.dropout=0.4")
    assert fewer < more
    assert abs(len(fewer) - 200) < 4 * np.sqrt(1000 * 0.2 * 0.8)
    assert abs(len(more) - 400) < 4 * np.sqrt(1000 * 0.4 * 0.6)
    assert dropouts("federation.dropout=0.2", "probe.k=9", "federation.participation=0.7") == fewer
    assert dropouts("federation.dropout=0.2", "seed=1") != fewer


def test_a_run_without_survivors_stops_and_says_so(plan: MakePlan, tmp_path: Path) -> None:
    with pytest.raises(BaffleError, match="10 rounds in a row"):
        simulate(plan("federation.dropout=0.99", "rounds=40"), tmp_path / "run")
    assert verify(tmp_path / "run").skipped >= 10


def test_a_tier_with_too_few_survivors_is_not_unmasked(plan: MakePlan, tmp_path: Path) -> None:
    """Only two clients answer the last directions. Unmasking would show their sum, so clients release nothing."""
    tiers = ["federation.tiers=[{k=2, share=0.6}]", "rounds=1"]
    for setting, skipped in (("secure.floor=3", 1), ("secure.mode=off", 0), ("secure.floor=2", 0)):
        assert simulate(plan(*tiers, setting), tmp_path / setting)["skipped_rounds"] == skipped


@pytest.mark.parametrize(
    ("client", "settings"), [(0, []), (4, [*BACKPROP, 'federation.level="epoch"'])], ids=["batch", "epoch"]
)
def test_a_client_whose_loss_is_not_finite_changes_no_sum(
    plan: MakePlan, tmp_path: Path, spoilt: Callable[[object], str], client: int, settings: list[str]
) -> None:
    share = iid(Seeds(0, b"").key("partition"), 60, 5)[client]
    own = [spoilt(share[0]), "federation.batch=0", "rounds=3", *settings]
    on, off = (simulate(plan(*own, f"secure.mode={mode}"), tmp_path / mode) for mode in ("on", "off"))
    assert on["weights_sha256"] == off["weights_sha256"]
    assert (on["skipped_rounds"], on["dropouts"]) == (0, 0)
    assert np.isfinite(on["train_loss"])
    if not settings:
        assert (on["forwards"], on["clipped"]) == (3 * 5 * 5, 3 * 4)
    assert [record["contributors"] for record in records_of(tmp_path / "on")] == [5] * 3
    assert set(_events(tmp_path / "on").values()) == {CONTRIBUTED}
    assert verify(tmp_path / "on").chain == verify(tmp_path / "off").chain
    for record in records_of(tmp_path / "on"):  # its loss counts as the largest, with its full weight
        assert record["loss"] > LOSS_MAX / 6


def _asks(kind: type[Request], *clients: int) -> Callable[[int, Request], bool]:
    """A predicate: is this a message of that kind to one of those clients?"""
    return lambda client, asked: client in clients and isinstance(asked, kind)


@pytest.mark.parametrize(
    ("downlink", "way", "lost"),
    [("scalars", "unheard", MaskedRequest), ("delta", "unanswered", MaskedRequest), ("weights", "unanswered", Turn)],
)
def test_an_abandoned_sum_is_a_round_in_which_nobody_answered(
    plan: MakePlan, tmp_path: Path, downlink: str, way: str, lost: type[Request]
) -> None:
    settings = [f"run.downlink={downlink}", "rounds=8"]
    secure = RoundsByHand(plan(*settings), tmp_path / "secure")
    plain = RoundsByHand(plan(*settings, "secure.mode=off"), tmp_path / "plain")
    bad = {2, 5} if lost is Turn else {2, 5, 6}
    unopened = {number + 1 for number in bad} if lost is Turn else set()  # a turn ends a round and opens the next
    for number in range(8):
        setattr(secure, way, _asks(lost, *((0, 1, 3) if number in bad else ())))
        plain.unheard = _asks(RoundRequest, *(range(5) if number in bad | unopened else ()))
        played, expected = secure.play(), plain.play()
        for key in ("loss", "contributors", "clipped"):
            assert played.metrics[key] == expected.metrics[key]
        if number in bad:
            assert "the sum was abandoned" in played.participation[2]
            assert "the sum was abandoned" in played.participation[4]
            assert (played.participation[1] == MISSING) == (lost is MaskedRequest)
        if number in bad | unopened:
            assert CONTRIBUTED not in played.participation.values()
        else:
            assert set(played.participation.values()) == {CONTRIBUTED}
        assert secure.present.state.weights_hash() == plain.present.state.weights_hash()
    for federation, folder in ((secure, "secure"), (plain, "plain")):
        federation.journal.close()
        assert verify(tmp_path / folder).skipped == len(bad | unopened)
    assert secure.present.chain == plain.present.chain


@pytest.mark.parametrize(
    ("downlink", "way", "lost"),
    [("weights", "unanswered", Hello), ("delta", "unheard", Turn), ("scalars", "unanswered", MaskedRequest)],
)
def test_a_client_that_misses_a_message_comes_back(
    plan: MakePlan, tmp_path: Path, downlink: str, way: str, lost: type[Request]
) -> None:
    """Two of five clients lose one kind of message in three rounds. The others are summed, and the two return."""
    federation = RoundsByHand(plan(f"run.downlink={downlink}", "rounds=9"), tmp_path / "run")
    for number in range(9):
        setattr(federation, way, _asks(lost, 1, 4) if number in (0, 3, 4) else _asks(lost))
        played = federation.play()
        assert played.metrics["contributors"] >= 3
        for client in (0, 2, 3):
            assert played.participation[client] == CONTRIBUTED
        assert played.participation.keys() == set(range(5))
        if number in (2, 7, 8):
            assert set(played.participation.values()) == {CONTRIBUTED}
        if number in (0, 3, 4) and lost is MaskedRequest:
            assert played.participation[1] == played.participation[4] == MISSING
    federation.journal.close()
    assert verify(tmp_path / "run").skipped == 0


def _asking(federation: RoundsByHand, message: Message, told: list[str]) -> Reply:
    return decode_reply(replace(federation.clients[0], tell=told.append).answer(encode(message)))


def test_a_client_answers_only_in_its_own_mode(plan: MakePlan, tmp_path: Path) -> None:
    secure = RoundsByHand(plan(), tmp_path / "secure")
    plain = RoundsByHand(plan("secure.mode=off"), tmp_path / "plain")
    request = open_round(plain.trajectory, plain.present, [list(range(5))], plain.downlink)[0][0]
    assert decode_reply(plain.clients[0].answer(encode(request))).round == request.round
    told = list[str]()
    assert _asking(secure, request, told) == Abstention(0)
    assert told == ["abstained: a RoundRequest, but this client's secure.mode is on"]
    asked: list[Message] = [
        Hello(0),
        Turn(Unmask(0, (0, 1, 2), ()), None),
        MaskedRequest(request, (0,), bytes(32), b""),
    ]
    for message in asked:
        assert _asking(plain, message, told) == Abstention(0)
        assert told[-1] == f"abstained: a {type(message).__name__}, but this client's secure.mode is off"
    for federation in (secure, plain):
        federation.journal.close()


def test_the_groups_of_a_run_cannot_be_changed_midway(plan: MakePlan, tmp_path: Path) -> None:
    simulate(plan("federation.clients=8", "secure.groups=2", "rounds=1"), tmp_path / "run")
    for setting in ("secure.groups=1", "secure.group_seeds=own", "secure.combine=median"):
        with pytest.raises(PlanError, match="but not the groups"):
            resume(tmp_path / "run", [setting, "rounds=2"])
    resume(tmp_path / "run", ["secure.floor=4", "secure.mode=malicious-server", "rounds=2"])
    assert verify(tmp_path / "run").rounds == 2


def test_groups_are_drawn_anew_every_round_and_hold_every_client_once(plan: MakePlan) -> None:
    changed = plan("federation.clients=20", "federation.participation=0.55", "secure.groups=3", "ring.n_max=20")
    trajectory = trajectory_of(changed, 5)
    drawn = [choose_groups(trajectory, number) for number in range(20)]
    for number, groups in enumerate(drawn):
        assert sorted(client for group in groups for client in group) == choose_clients(trajectory, number)
        assert sorted(map(len, groups)) == [3, 4, 4]
        assert all(group == sorted(group) for group in groups)
    assert len({str(groups) for groups in drawn}) == 20
    policy = policy_of(trajectory, {}, bytes(32))
    assert policy.groups_of is not None
    assert policy.groups_of(2) == drawn[2]
    assert policy.groups_of(changed.rounds) == []


def test_an_update_beyond_its_cap_is_skipped_and_says_so(plan: MakePlan, tmp_path: Path) -> None:
    def play(folder: str, cap: float) -> tuple[list[float], list[int]]:
        """Eight rounds: how far each moves the weights, and which of them were refused."""
        settings = ("update.optimizer=sgd", "rounds=8", "update.ema=0", f"update.norm_max={cap!r}")
        federation, lengths, refused = RoundsByHand(plan(*settings), tmp_path / folder), list[float](), list[int]()
        for number in range(8):
            before = federation.present.state
            played = federation.play()
            after, skipped = federation.present.state, federation.journal.entry(number).outcome().kind == "skipped"
            lengths.append(float(np.linalg.norm(after.weights.astype(np.float64) - before.weights)))
            assert skipped == bool(played.metrics.get("refused_update"))
            if skipped:
                refused.append(number)
                assert after is before
                assert (played.metrics["loss"], played.metrics["contributors"]) == (None, 0)
        federation.journal.close()
        return lengths, refused

    cap = sorted(play("free", 0.0)[0])[5]
    lengths, refused = play("capped", cap)
    assert max(lengths) <= cap
    assert 0 < len(refused) < 8
    assert verify(tmp_path / "capped").skipped == len(refused)
