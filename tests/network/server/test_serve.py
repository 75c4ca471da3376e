"""A networked run from end to end, with members in memory. Clients and servers vanish and come back; the run ends, and
everybody holds the same weights."""

from collections import Counter
from collections.abc import Callable, Set
from pathlib import Path
from shutil import copytree

import msgspec
import pytest

from baffle.client.replica import Replica
from baffle.core.messages import CatchUp, first_number, tag_of
from baffle.core.state import Present
from baffle.errors import PlanError, RunFolderError
from baffle.journal.audit import verify
from baffle.journal.store import Journal
from baffle.network.member.policy import Policy
from baffle.network.server.board import Board
from baffle.network.server.serve import SAY_AGAIN, WaitingLog, serve
from baffle.plan import change, load, parse
from baffle.simulation import repeat
from tests.support.clocks import FakeClock
from tests.support.lines_in_memory import Answer, Federation, LinesInMemory, StoppedError, new_keys


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ('secure.mode="malicious-server"', 'federation.weighting="uniform"'),
        ('run.downlink="weights"', "update.ema=0"),
        ("federation.participation=0.75",),
        ('federation.level="epoch"', "federation.steps=1"),
        ('secure.mode="on"', "secure.groups=1", 'task.model={name="lenet", channels=[2,2]}', "probe.micro_batch=7"),
    ],
)
def test_a_run_can_be_repeated_by_one_process(
    federation: Federation, settings: tuple[str, ...], tmp_path: Path
) -> None:
    federation.plan = change(federation.plan, ["federation.clients=4", "rounds=3", *settings])
    federation.policy = Policy(scalars_only=False, without_privacy=True)
    summary = federation.serve(federation.lines(4))
    repeated, verified = repeat(federation.run, tmp_path / "repeated"), verify(federation.run)
    assert summary["weights_sha256"] == repeated["weights_sha256"] == verified.weights_sha256
    assert verify(tmp_path / "repeated").chain == verified.chain
    assert summary["skipped_rounds"] == 0
    assert federation.said("4 of 4 clients hold the last weights")


def test_a_client_that_was_away_keeps_its_keys(federation: Federation) -> None:
    """Only its line broke. To ask for its keys again would send every other client a new list of them."""
    federation.plan = change(federation.plan, ["rounds=7"])
    lines, hellos = federation.lines(4), Counter[int]()
    lines.clients = {number: _counting(answer, hellos, number) for number, answer in lines.clients.items()}
    away: dict[int, Answer] = {}
    lines.at = {10: lambda: away.update({2: lines.clients.pop(2)}), 14: lambda: lines.clients.update(away)}
    summary = federation.serve(lines)
    assert federation.told.count("client 2 has left") == 1
    assert federation.told.count("client 2 takes part") == federation.told.count("client 2 is back") == 1
    assert summary["skipped_rounds"] == 0
    assert hellos == {0: 1, 1: 1, 2: 1, 3: 1}
    federation.require_agreement(range(4))


@pytest.mark.parametrize(("mode", "distribution"), [("on", "outer"), ("malicious-server", "rademacher")])
def test_a_client_with_a_large_model_that_was_away_catches_up(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, mode: str, distribution: str
) -> None:
    """It is told the hashes of the states that it missed, unless the server may lie."""
    federation.policy = Policy(without_privacy=True)
    monkeypatch.setattr("baffle.server.downlink.LARGE", 1)
    sent, replayed = list[str](), Replica._replayed

    def watched(replica: Replica, catch_up: CatchUp) -> tuple[Present, float]:
        sent.append(catch_up.kind)
        return replayed(replica, catch_up)

    monkeypatch.setattr(Replica, "_replayed", watched)
    settings = ["rounds=8", f"secure.mode={mode}", "federation.weighting=uniform"]
    settings += [f"probe.distribution={distribution}"]
    federation.plan = change(federation.plan, settings)
    lines = federation.lines(4)
    away: dict[int, Answer] = {}
    lines.at = {8: lambda: away.update({2: lines.clients.pop(2)}), 15: lambda: lines.clients.update(away)}
    federation.serve(lines)
    assert ("hashed" in sent) == (mode == "on")
    federation.require_agreement(range(4))


def _counting(answer: Answer, hellos: Counter[int], number: int) -> Answer:
    def counting(data: bytes) -> bytes | None:
        hellos[number] += tag_of(data) == "hello"
        return answer(data)

    return counting


def test_clients_that_have_left_do_not_count_in_later_rounds(federate: Callable[..., Federation]) -> None:
    """Of eight clients three leave in the middle of a round, and another one in each of the next two. A round for all
    eight would need five of them; one for the five that are here needs three."""
    federation = federate(8, "federation.clients=8")
    lines = federation.lines(8)
    leaving = {0: 1, 1: 1, 2: 1, 3: 2, 4: 3}

    def until_it_leaves(client: int, answer: Answer) -> Answer:
        def maybe(data: bytes) -> bytes | None:
            if tag_of(data) == "masked-request" and first_number(data) == leaving.get(client):
                del lines.clients[client]
                return None
            return answer(data)

        return maybe

    lines.clients = {client: until_it_leaves(client, answer) for client, answer in lines.clients.items()}
    assert federation.serve(lines)["skipped_rounds"] == 0
    with Journal.open(federation.run / "journal.sqlite") as journal:
        assert [record["contributors"] for record in journal.metrics()] == [8, 5, 4, 3, 3, 3]


@pytest.mark.slow
def test_the_server_is_killed_at_every_exchange_and_goes_on(federation: Federation, tmp_path: Path) -> None:
    """The members stay alive. At most two rounds are skipped, the journal verifies, and everybody holds its weights."""
    undisturbed = federation.lines(4)
    federation.serve(undisturbed)
    for stop in range(1, undisturbed.exchanges + 1):
        stopped = Federation(new_keys(tmp_path / str(stop), 4), tmp_path / str(stop), federation.plan)
        lines = stopped.lines(4)
        stopped.serve_until_killed(lines, before=stop)
        summary = stopped.serve(lines)
        assert summary["rounds"] == 6
        assert summary["skipped_rounds"] <= 2, stop
        assert stopped.said("4 of 4 clients hold the last weights"), stop
        stopped.require_agreement(range(4))


@pytest.mark.parametrize("stop", [6, 12])
def test_everybody_is_killed_at_once_and_goes_on(federation: Federation, stop: int) -> None:
    lines = federation.lines(4)
    federation.serve_until_killed(lines, before=stop)
    summary = federation.serve(federation.lines(4))
    assert summary["rounds"] == 6
    assert summary["skipped_rounds"] <= 2
    federation.require_agreement(range(4))


def test_a_restarted_server_waits_at_the_end_for_clients_that_took_part_before(federation: Federation) -> None:
    lines = federation.lines(4)
    federation.serve_until_killed(lines, before=13)
    del lines.clients[3]

    class LateClient(Board):
        def end(self, holders: int, expected: int, taking_part: Set[int]) -> None:
            if holders == 3 and 3 not in lines.clients:
                federation.come(lines, 3)
            super().end(holders, expected, taking_part)

    federation.serve(lines, board=LateClient(lines.clock))
    assert federation.said("4 of 4 clients hold the last weights")
    federation.require_agreement(range(4))


def test_nobody_waits_at_the_end_for_a_client_outside_the_last_epoch(federation: Federation) -> None:
    """More rounds are another plan, so they need another epoch; no more epochs come once those are played."""
    lines = federation.lines(4)
    federation.serve(lines)
    federation.plan = change(federation.plan, ["rounds=7"])
    del lines.clients[3]
    lines.seconds, began = 0.0, lines.clock.now()
    federation.serve(lines)
    assert lines.clock.now() - began < federation.plan.run.deadline_seconds
    assert federation.said("3 of 4 clients hold the last weights")


def test_a_client_that_missed_the_end_gets_the_weights_when_the_server_is_started_again(federation: Federation) -> None:
    lines = federation.lines(4)
    lines.at[14] = lambda: lines.clients.pop(3)
    federation.serve(lines)
    lines.clients[3] = federation.member(3).answer
    again = federation.serve(lines)
    assert again["rounds"] == 6
    federation.require_agreement(range(4))


def test_a_server_that_was_killed_before_its_plan_was_written_begins_anew(federation: Federation) -> None:
    federation.run.mkdir()
    (federation.run / ".baffle-0123456789abcdef.new").write_text('name = "ti')
    assert federation.serve(federation.lines(4))["rounds"] == 6


def test_a_run_of_another_kind_is_not_taken_over(federation: Federation, finished_run: Path) -> None:
    federation.folder = finished_run.parent
    finished_run.rename(federation.run)
    federation.plan = change(federation.plan, ["federation.clients=3", 'secure.mode="off"'])
    three = msgspec.structs.replace(federation.roster, clients=federation.roster.clients[:3])
    with pytest.raises(RunFolderError, match="was not begun by `baffle serve`"):
        serve(federation.plan, federation.run, LinesInMemory(), three)


def test_slower_clients_get_a_tier_of_the_plan(federation: Federation) -> None:
    """The largest of the declared ones that they afford; what one client affords changes nothing for the others."""
    settings = ["federation.clients=4", "federation.tiers=[{k=2, share=0.25}]", "secure.floor=2"]
    federation.plan, federation.policy = change(federation.plan, settings), Policy(floor=2)
    lines = federation.lines(3)
    lines.clients[3] = federation.member(3, affords=3).answer
    summary = federation.serve(lines)
    assert [federation.members[n]._client.worker.k for n in range(4)] == [4, 4, 2, 2]  # type: ignore[union-attr]
    assert (summary["rounds"], summary["skipped_rounds"], summary["refusals"]) == (6, 0, 0)
    federation.require_agreement(range(4))


@pytest.mark.parametrize(("stop", "clients"), [(0, "stay"), (0, "start again"), (9, "start again"), (12, "stay")])
def test_a_run_is_extended_while_it_goes_or_later(
    federation: Federation, tmp_path: Path, clients: str, stop: int
) -> None:
    """Clients that stay connected know when the run was to end, and must learn that it goes on."""
    lines = federation.lines(4)
    if stop:
        federation.serve_until_killed(lines, before=stop)
    else:
        assert federation.serve(lines)["rounds"] == 6
    federation.plan = change(federation.plan, ["rounds=9", "run.evaluate_every=2", "federation.clients=4"])
    summary = federation.serve(lines if clients == "stay" else federation.lines(4))
    assert summary["rounds"] == 9
    assert summary["skipped_rounds"] <= (2 if stop else 0)
    assert federation.said("the run now ends after 9 rounds, before it was 6")
    assert federation.said("4 of 4 clients hold the last weights")
    assert [parse(one.plan).rounds for one in federation.statements()] == [6, 9]
    federation.require_agreement(range(4))
    stored = load(str(federation.run / "plan.toml"))
    assert (stored.rounds, stored.run.evaluate_every) == (9, 2)
    with Journal.open(federation.run / "journal.sqlite") as journal:
        assert journal.plan() == stored
        assert all("test_accuracy" in record for record in list(journal.metrics())[7::2])
    assert repeat(federation.run, tmp_path / "repeated")["weights_sha256"] == summary["weights_sha256"]


def test_a_run_may_end_earlier_than_planned_but_not_before_the_present(federation: Federation) -> None:
    lines = federation.lines(4)
    federation.serve_until_killed(lines, before=13)
    played = verify(federation.run).rounds
    assert 1 < played < 5
    stored = (federation.run / "plan.toml").read_bytes()
    federation.plan = change(federation.plan, [f"rounds={played - 1}"])
    with pytest.raises(PlanError, match=rf"has already played {played}, so .* {played - 1}; .* or start a new run"):
        federation.serve(lines)
    assert (federation.run / "plan.toml").read_bytes() == stored
    federation.plan = change(federation.plan, [f"rounds={played + 1}"])
    assert federation.serve(lines)["rounds"] == played + 1
    federation.require_agreement(range(4))


def test_a_server_must_go_on_with_its_own_plan(federation: Federation) -> None:
    federation.serve(federation.lines(4))
    federation.plan = change(federation.plan, ["seed=5", "probe.k=7", "secure.floor=2", "rounds=99"])
    before = {file: file.read_bytes() for file in federation.run.iterdir()}
    with pytest.raises(RunFolderError) as refused:
        federation.serve(federation.lines(4))
    assert str(refused.value) == (
        f"the run in {federation.run} was begun with another plan: probe.k is 4 there and 7 here, secure.floor is 3 "
        "there and 2 here, seed is 0 there and 5 here; start a new run with another --out, or give the plan that it "
        "was begun with"
    )
    assert {file: file.read_bytes() for file in federation.run.iterdir()} == before


def test_what_a_run_waits_for_is_told_when_it_changes_and_now_and_then() -> None:
    told, clock = list[str](), FakeClock()
    waiting = WaitingLog(told.append, clock)
    for _ in range(5):
        waiting.say("too few", 2, 0)
    assert told == ["too few: waiting"]
    for _ in range(5):
        waiting.say("too few", 3, 2)
    refusal = "3 clients are connected, and 2 of them refuse to take part: each client's own log says why"
    assert told[1:] == [refusal]
    clock.sleep(SAY_AGAIN / 2)
    waiting.say("too few", 3, 2)
    clock.sleep(SAY_AGAIN / 2)
    waiting.say("too few", 3, 2)
    assert told[1:] == [refusal] * 2
    waiting.say("too few", 3, 3)
    assert told[3:] == [refusal.replace("2 of", "3 of")]
    waiting.end()
    waiting.say("too few", 3, 0)
    assert told[4:] == ["too few: waiting"]


def test_a_server_on_an_older_copy_of_a_run_that_is_over_says_that_clients_refuse(federation: Federation) -> None:
    lines = federation.lines(4)
    lines.at[9] = lambda: copytree(federation.run, federation.folder / "older")
    federation.serve(lines)
    federation.run.rename(federation.folder / "newest")
    (federation.folder / "older").rename(federation.run)

    def tell(words: str) -> None:
        if words.startswith("4 clients are connected, and 4 of them refuse to take part"):
            raise StoppedError

    federation.serve_until_killed(federation.lines(4), tell=tell)
