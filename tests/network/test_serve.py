"""A networked run from end to end, with members in memory. Clients and servers vanish and come back; the run ends, and
everybody holds the same weights."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from baffle.client.replica import Replica
from baffle.core.chain import Present
from baffle.core.messages import CatchUp, first_number, tag_of
from baffle.errors import PlanError, RunFolderError
from baffle.journal.audit import verify
from baffle.journal.store import Journal
from baffle.network import serve
from baffle.network.keys import ClientKeys
from baffle.network.policy import Policy
from baffle.plan import Plan, change, load
from baffle.repetition import repeat
from tests.support.lines_in_memory import Answer, Federation, LinesInMemory, StoppedError, new_keys

ON = ('secure.mode="on"',)


pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture
def keys(tmp_path: Path) -> list[ClientKeys]:
    return new_keys(tmp_path, 4)


@pytest.fixture
def federation(keys: list[ClientKeys], tiny: Callable[..., Plan], tmp_path: Path) -> Federation:
    """Four clients; three are enough for a round."""
    return Federation(keys, tmp_path, tiny(*ON, "run.deadline_seconds=0.2", "run.evaluate_every=100"))


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ('secure.mode="malicious-server"',),
        ('run.downlink="weights"', "update.ema=0"),
        ("federation.participation=0.75",),
        ('federation.level="epoch"', "federation.steps=1"),
        ('secure.mode="on"', "secure.groups=1", 'task.model={name="lenet", channels=[2,2]}', "probe.micro_batch=7"),
    ],
)
def test_a_run_can_be_repeated_in_one_process(
    federation: Federation, settings: tuple[str, ...], tmp_path: Path
) -> None:
    federation.plan = change(federation.plan, ["federation.clients=4", *settings])
    federation.policy = Policy(scalars_only=False)
    summary = federation.serve(federation.lines(4))
    repeated, verified = repeat(federation.run, tmp_path / "repeated"), verify(federation.run)
    assert summary["weights_sha256"] == repeated["weights_sha256"] == verified.weights_sha256
    assert verify(tmp_path / "repeated").chain == verified.chain
    assert summary["skipped_rounds"] == 0
    assert federation.said("4 of 4 clients hold the last weights")


def test_in_the_end_every_client_has_the_last_weights_on_disk(federation: Federation) -> None:
    summary = federation.serve(federation.lines(4))
    assert summary["weights_sha256"] == federation.require_agreement(range(4))
    assert all(member.over for member in federation.members.values())


def test_a_run_that_comes_to_nothing_says_so_in_the_servers_log(federation: Federation) -> None:
    federation.plan = change(federation.plan, ["rounds=40", "update.rate=1e-7"])
    federation.serve(federation.lines(4))
    assert federation.said("the loss is flat")
    assert federation.said("update.rate = 1e-07 is too small")


def test_a_client_that_is_restarted_comes_back(federation: Federation) -> None:
    lines = federation.lines(4)

    def restart(exchange: int) -> None:
        if exchange in (9, 14):
            lines.clients[2] = federation.member(2).answer

    lines.before = restart
    summary = federation.serve(lines)
    assert summary["rounds"] == 6
    assert summary["skipped_rounds"] == 0
    assert federation.said("client 2 must be told about the run again")
    federation.require_agreement(range(4))


def test_a_client_that_was_away_keeps_its_keys(federation: Federation) -> None:
    """Only its line broke. To ask for its keys again would send every other client a new list of them."""
    federation.plan = change(federation.plan, ["rounds=10"])
    lines, hellos = federation.lines(4), Counter[int]()
    lines.clients = {number: _counting(answer, hellos, number) for number, answer in lines.clients.items()}
    away: dict[int, Answer] = {}

    def break_line(exchange: int) -> None:
        if exchange == 10:
            away[2] = lines.clients.pop(2)
        if exchange == 14:
            lines.clients.update(away)

    lines.before = break_line
    summary = federation.serve(lines)
    assert federation.told.count("client 2 has left") == 1
    assert federation.told.count("client 2 takes part") == federation.told.count("client 2 is back") == 1
    assert summary["skipped_rounds"] == 0
    assert hellos == {0: 1, 1: 1, 2: 1, 3: 1}
    federation.require_agreement(range(4))


@pytest.mark.parametrize("mode", ["on", "malicious-server"])
@pytest.mark.parametrize("distribution", ["rademacher", "outer"])
def test_a_client_with_a_large_model_that_was_away_catches_up(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, mode: str, distribution: str
) -> None:
    """It is told the hashes of the states that it missed, unless the server may lie."""
    monkeypatch.setattr("baffle.server.downlink.LARGE", 1)
    sent, replayed = list[str](), Replica._replayed

    def watched(replica: Replica, catch_up: CatchUp) -> Present:
        sent.append(catch_up.kind)
        return replayed(replica, catch_up)

    monkeypatch.setattr(Replica, "_replayed", watched)
    federation.plan = change(
        federation.plan, ["rounds=12", f"secure.mode={mode}", f"probe.distribution={distribution}"]
    )
    lines = federation.lines(4)
    away: dict[int, Answer] = {}

    def break_line(exchange: int) -> None:
        if exchange == 12:
            away[2] = lines.clients.pop(2)
        if exchange == 22:
            lines.clients.update(away)

    lines.before = break_line
    federation.serve(lines)
    assert ("hashed" in sent) == (mode == "on")
    federation.require_agreement(range(4))


def _counting(answer: Answer, hellos: Counter[int], number: int) -> Answer:
    def counting(data: bytes) -> bytes | None:
        hellos[number] += tag_of(data) == "hello"
        return answer(data)

    return counting


def test_clients_that_have_left_do_not_count_in_later_rounds(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    """Of eight clients three leave in the middle of a round, and another one in each of the next two. A round for all
    eight would need five of them; one for the five that are here needs three."""
    plan = tiny(*ON, "run.deadline_seconds=0.2", "run.evaluate_every=100", "federation.clients=8", "rounds=6")
    federation = Federation(new_keys(tmp_path, 8), tmp_path, plan)
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


def test_a_client_joins_late_and_another_leaves(federation: Federation) -> None:
    federation.plan = change(federation.plan, ["rounds=10"])
    lines = federation.lines(3)

    def come_and_go(exchange: int) -> None:
        if exchange == 10:
            lines.clients[3] = federation.member(3).answer
        if exchange == 20:
            del lines.clients[0]

    lines.before = come_and_go
    summary = federation.serve(lines, least=3)
    assert (summary["rounds"], summary["skipped_rounds"]) == (10, 0)
    assert federation.said("client 3 takes part")
    assert federation.said("client 0 has left")
    federation.require_agreement((1, 2, 3))


def test_a_client_that_is_silent_for_a_while_is_a_dropout(federation: Federation) -> None:
    federation.plan = change(federation.plan, ["rounds=8"])
    lines = federation.lines(4)
    answer = lines.clients[1]
    silent = iter([False] * 6 + [True] * 4)
    lines.clients[1] = lambda data: None if next(silent, False) else answer(data)
    summary = federation.serve(lines)
    assert summary["rounds"] == 8
    assert summary["dropouts"] > 0
    federation.require_agreement(range(4))


def test_the_server_waits_while_too_few_clients_are_here(federation: Federation) -> None:
    """No round is skipped while the others are away."""
    lines = federation.lines(4)
    away: dict[int, Callable[[bytes], bytes | None]] = {}

    def leave(exchange: int) -> None:
        if exchange == 9:
            away.update({client: lines.clients.pop(client) for client in (0, 1)})

    lines.before = leave

    def tell(line: str) -> None:
        federation.told.append(line)
        if "are needed: waiting" in line:
            lines.clients.update(away)

    summary = serve.serve(federation.plan, federation.run, lines, federation.roster, tell=tell)
    assert federation.said("2 clients are here, 3 are needed: waiting")
    assert summary["skipped_rounds"] <= 2
    federation.require_agreement(range(4))


def stop_at(stop: int) -> Callable[[int], None]:
    """Kills the server before this exchange."""

    def before(exchange: int) -> None:
        if exchange == stop:
            raise StoppedError

    return before


@pytest.mark.slow
def test_the_server_is_killed_at_every_exchange_and_goes_on(federation: Federation, tmp_path: Path) -> None:
    """The members stay alive. At most two rounds are skipped, the journal verifies, and everybody holds its weights."""
    undisturbed = federation.lines(4)
    federation.serve(undisturbed)
    for stop in range(1, undisturbed.exchanges + 1):
        stopped = Federation(new_keys(tmp_path / str(stop), 4), tmp_path / str(stop), federation.plan)
        lines = stopped.lines(4)
        lines.before = stop_at(stop)
        with pytest.raises(StoppedError):
            stopped.serve(lines)
        summary = stopped.serve(lines)
        assert summary["rounds"] == 6
        assert summary["skipped_rounds"] <= 2, stop
        assert stopped.said("4 of 4 clients hold the last weights"), stop
        stopped.require_agreement(range(4))


@pytest.mark.parametrize("stop", [6, 9, 12])
def test_everybody_is_killed_at_once_and_goes_on(federation: Federation, stop: int) -> None:
    lines = federation.lines(4)
    lines.before = stop_at(stop)
    with pytest.raises(StoppedError):
        federation.serve(lines)
    summary = federation.serve(federation.lines(4))
    assert summary["rounds"] == 6
    assert summary["skipped_rounds"] <= 2
    federation.require_agreement(range(4))


def test_a_client_that_missed_the_end_gets_the_weights_when_the_server_is_started_again(federation: Federation) -> None:
    lines = federation.lines(4)

    def leave(exchange: int) -> None:
        if exchange == 14:
            del lines.clients[3]

    lines.before = leave
    federation.serve(lines)
    lines.clients[3] = federation.member(3).answer
    again = federation.serve(lines)
    assert again["rounds"] == 6
    federation.require_agreement(range(4))


def test_a_server_that_was_killed_before_its_plan_was_written_begins_anew(federation: Federation) -> None:
    federation.run.mkdir()
    (federation.run / ".plan.toml.new").write_text('name = "ti')
    assert federation.serve(federation.lines(4))["rounds"] == 6


def test_a_run_of_another_kind_is_not_taken_over(federation: Federation, finished_run: Path) -> None:
    federation.folder = finished_run.parent
    finished_run.rename(federation.run)
    federation.plan = change(federation.plan, ["federation.clients=3", 'secure.mode="off"'])
    three = msgspec.structs.replace(federation.roster, clients=federation.roster.clients[:3])
    with pytest.raises(RunFolderError, match="was not begun by `baffle serve`"):
        serve.serve(federation.plan, federation.run, LinesInMemory(), three)


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


def test_a_client_that_affords_no_tier_refuses_and_the_others_go_on(federation: Federation) -> None:
    lines, log = federation.lines(3), list[str]()
    lines.clients[3] = federation.member(3, affords=2, tell=log.append).answer
    summary = federation.serve(lines)
    assert (summary["rounds"], summary["skipped_rounds"]) == (6, 0)
    assert log == ["will not take part: 4 directions a round, but this client affords 2"]
    federation.require_agreement(range(3))


RESTARTS: dict[str, Callable[[Federation, LinesInMemory], LinesInMemory]] = {
    "stay": lambda _federation, lines: lines,
    "start again": lambda federation, _lines: federation.lines(4),
}
"""What clients do while the server is away."""


@pytest.mark.parametrize("clients", RESTARTS)
@pytest.mark.parametrize("stop", [0, 9, 12])
def test_a_run_is_extended_whether_it_is_over_or_not(
    federation: Federation, tmp_path: Path, clients: str, stop: int
) -> None:
    """Clients that stay connected know when the run was to end, and must learn that it goes on."""
    lines = federation.lines(4)
    if stop:
        lines.before = stop_at(stop)
        with pytest.raises(StoppedError):
            federation.serve(lines)
    else:
        assert federation.serve(lines)["rounds"] == 6
    federation.plan = change(federation.plan, ["rounds=9", "run.evaluate_every=2", "federation.clients=4"])
    summary = federation.serve(RESTARTS[clients](federation, lines))
    assert summary["rounds"] == 9
    assert summary["skipped_rounds"] <= (2 if stop else 0)
    assert federation.said("the run now ends after 9 rounds, before it was 6")
    assert federation.said("4 of 4 clients hold the last weights")
    federation.require_agreement(range(4))
    stored = load(str(federation.run / "plan.toml"))
    assert (stored.rounds, stored.run.evaluate_every) == (9, 2)
    with Journal.open(federation.run / "journal.sqlite") as journal:
        assert journal.plan() == stored
        assert all("test_accuracy" in record for record in list(journal.metrics())[7::2])
    assert repeat(federation.run, tmp_path / "repeated")["weights_sha256"] == summary["weights_sha256"]


def test_a_run_may_end_earlier_than_planned_but_not_before_the_present(federation: Federation) -> None:
    lines = federation.lines(4)
    lines.before = stop_at(13)
    with pytest.raises(StoppedError):
        federation.serve(lines)
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
