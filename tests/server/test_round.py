"""A round, top to bottom: who takes part, what bad replies do, how clients catch up, how weights are evaluated."""

import json
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baffle.core.arrays import F32
from baffle.core.messages import RoundRequest, decode
from baffle.core.ports import Batch
from baffle.data.sources import Source, load
from baffle.journal.audit import verify
from baffle.plan import Plan
from baffle.runtime.torch.loss import TorchLoss
from baffle.schedule import choose_clients
from baffle.simulation import resume, simulate
from baffle.trajectory import trajectory_of
from tests.support.rounds_by_hand import RoundsByHand

MakePlan = Callable[..., Plan]


class Federation(RoundsByHand):
    """Counts the kinds of catch-up that the server sends, and lets a test change or drop replies."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, folder)
        self.disturb: Callable[[int, bytes], bytes | None] = lambda _client, reply: reply
        self.kinds: Counter[str] = Counter()
        self.most_outcomes = 0

    def carry(self, client: int, message: bytes) -> bytes | None:
        catch_up = decode(message, RoundRequest).catch_up
        self.kinds[catch_up.kind] += 1
        if catch_up.kind == "outcomes":
            self.most_outcomes = max(self.most_outcomes, len(catch_up.items))
        return self.disturb(client, self.clients[client].answer(message))


@pytest.mark.parametrize(
    ("downlink", "participation", "settings"),
    [
        ("scalars", 1.0, []),
        ("scalars", 0.3, []),
        ("delta", 0.3, []),
        ("weights", 0.3, []),
        ("scalars", 0.3, ['estimator="backprop"']),
        ("scalars", 0.3, ['federation.level="epoch"', "rounds=4"]),
    ],
)
def test_clients_that_keep_their_own_weights_end_where_a_simulation_ends(
    tiny: MakePlan, tmp_path: Path, downlink: str, participation: float, settings: list[str]
) -> None:
    fixed = ("federation.clients=7", "rounds=10", "federation.batch=64")
    plan = tiny(*fixed, f"federation.participation={participation}", f"run.downlink={downlink}", *settings)
    federation = Federation(plan, tmp_path / "by hand")
    for _ in range(plan.rounds):
        played = federation.play()
        assert set(played.participation.values()) == {"contributed"}
    federation.journal.close()
    expected = simulate(plan, tmp_path / "simulated")
    assert federation.present.state.weights_hash().hex() == expected["weights_sha256"]
    assert verify(tmp_path / "by hand").weights_sha256 == expected["weights_sha256"]
    if settings:
        return
    if downlink == "scalars":
        assert federation.kinds.keys() == {"outcomes"}
        assert (federation.most_outcomes > 1) == (participation < 1)
    if downlink == "delta":
        assert federation.kinds["delta"] > 0
        assert (federation.kinds["weights"] > 7) == (participation < 1)
    if downlink == "weights":
        assert federation.kinds.keys() == {"weights"}


def test_a_missing_reply_is_recorded_and_the_round_goes_on(tiny: MakePlan, tmp_path: Path) -> None:
    federation = Federation(tiny(), tmp_path / "run")
    federation.disturb = lambda client, reply: None if client == 1 else reply
    for _ in range(2):
        played = federation.play()
        assert played.participation == {0: "contributed", 1: "missing", 2: "contributed"}
        assert (played.metrics["contributors"], played.metrics["replies"]) == (2, 2)
        assert played.metrics["uplink_bytes"] == 2 * 60
        assert played.metrics["requests"] + played.metrics["joins"] == 3
    federation.disturb = lambda client, reply: reply[:-1] if client == 1 else reply
    played = federation.play()
    assert "expected a message" in played.participation[1]
    assert played.metrics["contributors"] == 2
    federation.disturb = lambda _client, reply: reply
    assert set(federation.play().participation.values()) == {"contributed"}
    assert federation.most_outcomes == 3  # nothing proves a state in the middle of a run, so it applies all of them
    federation.journal.close()
    verify(tmp_path / "run")


@pytest.mark.parametrize("answer", [None, b"noise"])
def test_a_round_without_any_contribution_is_skipped_and_changes_nothing(
    tiny: MakePlan, tmp_path: Path, answer: bytes | None
) -> None:
    federation = Federation(tiny(), tmp_path / "run")
    federation.play()
    before = federation.present
    federation.disturb = lambda _client, _reply: answer
    played = federation.play()
    assert (played.metrics["contributors"], played.metrics["loss"]) == (0, None)
    assert federation.present.round == before.round + 1
    assert federation.present.state is before.state
    federation.disturb = lambda _client, reply: reply
    federation.play()
    federation.journal.close()
    verified = verify(tmp_path / "run")
    assert (verified.rounds, verified.skipped) == (3, 1)


def test_the_journal_holds_the_round_its_metrics_and_who_took_part(tiny: MakePlan, tmp_path: Path) -> None:
    federation = Federation(tiny("run.commit_seconds=0"), tmp_path / "run")
    federation.disturb = lambda client, reply: None if client == 1 else reply
    played = federation.play()
    entry = federation.journal.entry(0)
    assert entry.chain == played.present.chain == federation.present.chain
    (group,) = entry.outcome().groups
    assert group.key == 0
    assert group.weight == 480 + 479
    assert np.any(group.numbers())
    assert list(federation.journal.metrics()) == [{"round": 0, **played.metrics}]
    federation.journal.close()
    db = sqlite3.connect(tmp_path / "run" / "journal.sqlite")
    rows = db.execute("SELECT * FROM participation ORDER BY client").fetchall()
    db.close()
    assert rows == [(0, 0, "contributed"), (0, 1, "missing"), (0, 2, "contributed")]


def test_the_bytes_of_joining_are_counted_apart(tiny: MakePlan, tmp_path: Path) -> None:
    federation = Federation(tiny("federation.clients=10", "federation.participation=0.5"), tmp_path / "run")
    seen: set[int] = set()
    for _ in range(8):
        played = federation.play()
        new = played.participation.keys() - seen
        assert (played.metrics["joins"], played.metrics["requests"]) == (len(new), 5 - len(new))
        assert bool(played.metrics["join_bytes"]) == bool(new)
        assert bool(played.metrics["downlink_bytes"]) == (len(new) < 5)
        seen |= played.participation.keys()
    federation.journal.close()


@pytest.mark.parametrize(("participation", "expected"), [(1.0, 20), (0.3, 6), (0.01, 1)])
def test_as_many_clients_take_part_as_the_plan_says(tiny: MakePlan, participation: float, expected: int) -> None:
    settings = ("federation.clients=20", f"federation.participation={participation}", "ring.n_max=20")
    trajectory = trajectory_of(tiny(*settings), 5)
    rounds = [choose_clients(trajectory, number) for number in range(200)]
    assert {len(clients) for clients in rounds} == {expected}
    assert all(clients == sorted(set(clients)) for clients in rounds)
    counts = Counter(client for clients in rounds for client in clients)
    assert set(counts) == set(range(20))
    assert rounds == [choose_clients(trajectory, number) for number in range(200)]
    if participation == 0.3:
        assert max(abs(count - 60) for count in counts.values()) < 30
        other = trajectory_of(tiny("probe.k=9", *settings), 5)
        assert rounds[:9] == [choose_clients(other, number) for number in range(9)]


def in_domains() -> Source:
    """The digits, alternately in two domains, and a third domain without samples."""
    source = load("digits")
    train, test = (replace(part, domain_of=np.arange(len(part)) % 2) for part in (source.train, source.test))
    return Source(train, test, source.classes, ("even", "odd", "untested"))


def test_a_run_measures_everything_in_one_forward_pass(
    tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, outputs = list[int](), TorchLoss.outputs

    def counted(self: TorchLoss, weights: F32, batch: Batch) -> F32:
        seen.append(len(batch.y))
        return outputs(self, weights, batch)

    monkeypatch.setattr(TorchLoss, "outputs", counted)
    plan = tiny(f"task.data={__name__}:in_domains", "run.evaluate_every=3", "update.ema=0")
    summary = simulate(plan, tmp_path / "run")
    assert seen == [2] + [len(load("digits").test)] * 2  # the model is first tried on two samples
    assert summary["test_domains"].keys() == {"even", "odd"}
    assert summary["test_accuracy"] <= summary["test_top5"] < 1
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("test_accuracy", "test_accuracy_last", "test_top5", "test_domains"):
        assert last[name] == summary[name]
    assert resume(tmp_path / "run", own_code=True)["test_domains"] == summary["test_domains"]


def test_domains_are_about_the_averaged_weights(tiny: MakePlan, tmp_path: Path) -> None:
    """Their mean is the accuracy of the averaged weights, which differs here from that of the last weights."""
    summary = simulate(tiny(f"task.data={__name__}:in_domains", "update.rate=0.5"), tmp_path / "run")
    assert summary["test_accuracy"] != summary["test_accuracy_last"]
    counts = np.bincount(np.arange(len(load("digits").test)) % 2)
    mean = np.average([domain["accuracy"] for domain in summary["test_domains"].values()], weights=counts)
    assert mean == pytest.approx(summary["test_accuracy"], abs=2e-6)
