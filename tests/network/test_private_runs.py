"""Private runs over a network, from end to end: noise, everybody's ledger, and a budget that ends the run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from baffle.aggregation.client.marks import MarksFile
from baffle.errors import BaffleError, PlanError
from baffle.journal.audit import verify
from baffle.network.member.policy import Policy
from baffle.network.server.board import Board
from baffle.network.status import LinkCounts
from baffle.plan import change, load
from baffle.simulation import repeat
from tests.support.lines_in_memory import Federation, LinesInMemory
from tests.support.watched_runs import records_of

PRIVATE = ("federation.weighting=uniform", "secure.floor=3", "privacy.clip=1.0", "privacy.epsilon=20")


@pytest.fixture
def federation(federate: Callable[..., Federation]) -> Federation:
    """Four clients; three are enough for a round."""
    return federate(4, *PRIVATE, policy=Policy(scalars_only=False))


def spent(federation: Federation, number: int) -> list[int]:
    """How many vectors a client has paid for at each price."""
    return [release.count for release in MarksFile(federation.keys[number].marks).ledger.releases()]


@pytest.mark.parametrize(
    "settings",
    [(), ("federation.participation=0.75",), ("federation.tiers=[{k=2, share=0.25}]",), ('estimator="backprop"',)],
)
def test_a_private_run_ends_and_verifies_and_every_ledger_counts_its_vectors(
    federation: Federation, settings: tuple[str, ...], tmp_path: Path
) -> None:
    federation.plan = change(federation.plan, ["federation.clients=4", *settings])
    board = Board()
    summary = federation.serve(federation.lines(4), board=board)
    assert (summary["rounds"], summary["skipped_rounds"], summary["train_loss"]) == (6, 0, None)
    status = board.status(LinkCounts())
    assert (status.epsilon, status.loss) == (summary["epsilon"], None)
    assert summary["weights_sha256"] == federation.require_agreement(range(4))
    assert 19.9 < summary["epsilon"] <= 20
    asked = [sum(spent(federation, number)) for number in range(4)]
    assert sum(asked) == sum(record["contributors"] for record in records_of(federation.run))
    assert max(asked) <= 6
    plan = load(str(federation.run / "plan.toml"))
    for number in range(4):
        own = MarksFile(federation.keys[number].marks).ledger.epsilon(plan.privacy.delta)
        assert own <= summary["epsilon"] + 1e-6
        if asked[number] == 6:
            assert own == pytest.approx(summary["epsilon"], abs=1e-6)
    with pytest.raises(PlanError, match="verified, not repeated"):
        repeat(federation.run, tmp_path / "repeated")


def test_a_spent_budget_ends_the_run_with_a_sentence_and_outlives_it(federation: Federation) -> None:
    """It pays for a part of the run. A server that then deletes what it has and begins again finds nobody."""
    federation.policy = Policy(most_epsilon=12.0)
    federation.plan = change(federation.plan, ["rounds=40", "privacy.epsilon=60", "federation.clients=4"])
    with pytest.raises(BaffleError, match=r"10 rounds in a row were skipped.* A client whose budget is spent"):
        federation.serve(federation.lines(4))
    delta, played = 1e-5, verify(federation.run).rounds
    paid = [sum(spent(federation, number)) for number in range(4)]
    assert 0 < paid[0] == paid[3] == played - 10
    for number in range(4):
        assert 10 < MarksFile(federation.keys[number].marks).ledger.epsilon(delta) <= 12
    log = list[str]()
    federation.run = federation.folder / "again"
    lines = LinesInMemory({number: federation.member(number, tell=log.append).answer for number in range(4)})
    federation.serve_until_killed(lines, before=13)
    assert any("this client's budget is spent" in words for words in log)
    assert [sum(spent(federation, number)) for number in range(4)] == paid
