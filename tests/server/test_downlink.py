"""How the server brings clients up to date in a networked run: every catch-up leads a replica to the present."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baffle.client.replica import Replica
from baffle.core.messages import CatchUp, RoundRequest
from baffle.journal.store import Journal
from baffle.plan import Plan
from baffle.server.downlink import Downlink
from tests.support.statements import NetworkedRun


@pytest.fixture
def run(tiny: Callable[..., Plan], tmp_path: Path) -> Iterator[NetworkedRun]:
    """A run with an epoch that begins with round 4, and is now at round 6."""
    networked = NetworkedRun(tiny("ring.n_max=20", "federation.clients=4", "secure.mode=on"), tmp_path / "run")
    networked.begin()
    networked.play(4)
    networked.begin()
    networked.play(2)
    yield networked
    networked.journal.close()


def request(run: NetworkedRun, catch_up: CatchUp) -> RoundRequest:
    present = run.present
    digest, weights = run.lineage.trajectory.digest, present.state.weights_hash()
    return RoundRequest(present.round, digest, present.chain, weights, catch_up)


def at(run: NetworkedRun, number: int) -> Replica:
    """A client's replica that has come to a round of the run by itself."""
    present = run.lineage.beginning(run.initial)
    for entry in list(run.journal.entries())[:number]:
        present = run.lineage.advance(present, entry.outcome_bytes)
    return Replica(run.lineage, present)


@pytest.mark.parametrize("large", [False, True])
def test_every_client_comes_to_the_present_and_is_told_the_hashes_between_if_the_model_is_large(
    run: NetworkedRun, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr("baffle.server.downlink.LARGE", 1)
    downlink = Downlink("scalars", run.journal, run.lineage)
    for held in range(7):
        downlink.holds(1, held)
        catch_up = downlink.catch_ups([1], run.present)[1]
        if held < 5 and catch_up.kind != "snapshot":
            assert catch_up.kind == ("hashed" if large else "outcomes")
            assert all(len(digest) == 32 * large for _, digest in catch_up.steps()[:-1])
        replica = at(run, held)
        assert replica.weights_for(request(run, catch_up)).tobytes() == run.present.state.weights.tobytes()
        assert replica.chain == run.present.chain


def test_a_server_that_was_started_again_leaves_hashes_to_its_clients(
    run: NetworkedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baffle.server.downlink.LARGE", 1)
    run.play(1)
    with Journal.open(run.folder / "journal.sqlite") as reopened:
        downlink = Downlink("scalars", reopened, run.lineage)
        downlink.holds(1, 4)
        catch_up = downlink.catch_ups([1], run.present)[1]
    assert [digest for _, digest in catch_up.steps()] == [b""] * 3
    assert at(run, 4).weights_for(request(run, catch_up)).tobytes() == run.present.state.weights.tobytes()


def test_in_the_first_epoch_there_is_nothing_to_send(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    """Clients make the initial weights themselves."""
    run = NetworkedRun(tiny("ring.n_max=20", "federation.clients=4", "secure.mode=on"), tmp_path / "run")
    run.begin()
    downlink = Downlink("scalars", run.journal, run.lineage)
    assert downlink.catch_ups([0], run.present)[0] == CatchUp("outcomes", 0, ())
    run.play(3)
    assert len(downlink.catch_ups([0], run.present)[0].items) == 3
    run.journal.close()


def test_a_client_of_an_earlier_epoch_gets_what_is_shorter(run: NetworkedRun) -> None:
    downlink = Downlink("scalars", run.journal, run.lineage)
    for held in range(7):
        downlink.holds(held, held)
    kinds = {held: catch_up.kind for held, catch_up in downlink.catch_ups(list(range(7)), run.present).items()}
    outcome, proof = len(run.journal.entry(0).outcome_bytes), sum(map(len, downlink._proof()))
    assert kinds == {
        held: "outcomes" if held >= 4 or (4 - held) * outcome <= proof else "snapshot" for held in range(7)
    }


def test_the_next_epoch_moves_the_state_that_newcomers_begin_with(run: NetworkedRun) -> None:
    downlink = Downlink("scalars", run.journal, run.lineage)
    run.begin()
    downlink.lineage = run.lineage
    catch_up = downlink.catch_ups([0], run.present)[0]
    assert (catch_up.kind, catch_up.since, len(catch_up.items)) == ("snapshot", 6, 3)
    replica = at(run, 0)
    replica.weights_for(request(run, catch_up))
    assert (replica.round, replica.chain) == (6, run.present.chain)


def test_a_client_that_says_it_holds_nothing_is_a_newcomer_again(run: NetworkedRun) -> None:
    downlink = Downlink("scalars", run.journal, run.lineage)
    downlink.holds(0, 5)
    assert downlink.newcomers([0]) == set()
    downlink.holds(0, None)
    assert downlink.newcomers([0]) == {0}
    catch_up = downlink.catch_ups([0], run.present)[0]
    assert (catch_up.kind, catch_up.since, len(catch_up.items)) == ("snapshot", 4, 3 + 2)
    downlink.delivered([0], run.present)
    assert downlink.catch_ups([0], run.present)[0] == CatchUp("outcomes", 6, ())
