"""Whole runs with the secure sum: the same bits as without it, even if clients drop, abstain or come back."""

import json
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

from baffle.aggregation.client.session import KEYS_AT_ONCE
from baffle.aggregation.messages import Hello, MaskedRequest, Opening, Request, Turn, Unmask, decode_request
from baffle.core.messages import Abstention, Message, Reply, RoundRequest, decode_reply, encode
from baffle.core.ports import CONTRIBUTED, MISSING
from baffle.core.seeds import Seeds
from baffle.data.partition import iid
from baffle.errors import BaffleError, PlanError
from baffle.journal.audit import verify
from baffle.plan import Plan, load
from baffle.schedule import choose_clients, choose_groups, policy_of
from baffle.server.recorder import Summary
from baffle.server.round import open_round
from baffle.simulation import drops, resume, simulate
from baffle.task.load import load_task
from baffle.trajectory import Trajectory, trajectory_of
from tests.support.rounds_by_hand import RoundsByHand
from tests.support.watched_runs import interrupt_after, records_of

Cli = Callable[..., CompletedProcess[str]]
MakePlan = Callable[..., Plan]

EPOCH = ['federation.level="epoch"', "rounds=3", "federation.batch=100", "probe.micro_batch=64"]
BACKPROP = ['estimator="backprop"']
VARIANTS: dict[str, list[str]] = {
    "forward": [],
    "central": ["probe.scheme=central"],
    "gaussian": ["probe.distribution=gaussian"],
    "uniform": ["federation.weighting=uniform"],
    "tiers": ["federation.tiers=[{k=2, share=0.4}]"],
    "own seeds": ["federation.seeds=own"],
    "own seeds groups": ["federation.clients=10", "federation.seeds=own", "secure.groups=3", "secure.combine=median"],
    "few": ["federation.clients=10", "federation.participation=0.4", "rounds=12"],
    "epoch": EPOCH,
    "backprop": BACKPROP,
    "backprop epoch": [*BACKPROP, *EPOCH],
    "delta": ["run.downlink=delta"],
    "weights": ["run.downlink=weights"],
    "few delta": ["federation.clients=10", "federation.participation=0.4", "rounds=12", "run.downlink=delta"],
    "one worker": ["run.workers=1"],
    "lenet": ['task.model={name="lenet", channels=[2, 3], norm="group"}', "rounds=3"],
    "clipped": ["ring.d_max=0.01"],
    "just the floor": ["federation.clients=3"],
    "floor of all": ["secure.floor=5"],
    "highest threshold": ["secure.threshold=5"],
    "two clients": ["federation.clients=2", "secure.floor=2"],
    "keys run out": [f"rounds={KEYS_AT_ONCE + 6}"],
    "dropout": ["federation.clients=9", "federation.dropout=0.2", "rounds=12"],
    "dropout few": ["federation.clients=14", "federation.participation=0.8", "federation.dropout=0.2", "rounds=12"],
    "dropout tiers": ["federation.clients=9", "federation.dropout=0.2", "federation.tiers=[{k=2, share=0.2}]"],
    "dropout own seeds": ["federation.clients=9", "federation.dropout=0.2", "federation.seeds=own"],
    "dropout epoch": ["federation.clients=9", "federation.dropout=0.2", *EPOCH],
    "groups": ["federation.clients=10", "secure.groups=3"],
    "groups own": ["federation.clients=10", "secure.groups=3", "secure.group_seeds=own"],
    "groups median": ["federation.clients=10", "secure.groups=3", "secure.combine=median"],
    "groups own median": [
        "federation.clients=10",
        "secure.groups=3",
        "secure.group_seeds=own",
        "secure.combine=median",
        "federation.tiers=[{k=2, share=0.1}]",
        "secure.floor=2",
    ],
    "groups epoch": ["federation.clients=10", "secure.groups=3", "secure.combine=median", *EPOCH],
    "groups few": ["federation.clients=14", "federation.participation=0.6", "secure.groups=2", "rounds=12"],
    "dropout groups": [
        "federation.clients=14",
        "federation.dropout=0.1",
        "secure.groups=2",
        "secure.group_seeds=own",
        "rounds=12",
    ],
    "dropout backprop delta": ["federation.clients=9", "federation.dropout=0.2", *BACKPROP, "run.downlink=delta"],
}
"""Settings under which every round has enough survivors."""


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


def _dropped(trajectory: Trajectory) -> set[tuple[int, int]]:
    """The rounds and clients for which the plan draws a dropout."""
    rounds = range(trajectory.plan.rounds)
    return {(n, client) for n in rounds for client in choose_clients(trajectory, n) if drops(trajectory, n, client)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "keys run out" else []) for name in VARIANTS]
)
def test_with_and_without_the_secure_sum_a_run_ends_with_the_same_weights(
    plan: MakePlan, tmp_path: Path, name: str
) -> None:
    summaries: dict[str, Summary] = {
        mode: simulate(plan(*VARIANTS[name], f"secure.mode={mode}"), tmp_path / mode) for mode in ("on", "off")
    }
    on, off = summaries["on"], summaries["off"]
    assert (on["secure"], off["secure"]) == ("on", "off")
    for key in (
        "weights_sha256",
        "trajectory_digest",
        "test_accuracy",
        "train_loss",
        "forwards",
        "clipped",
        "dropouts",
    ):
        assert on[key] == off[key], key
    assert on["plan_digest"] != off["plan_digest"]
    assert on["skipped_rounds"] == off["skipped_rounds"] == 0
    assert (on["dropouts"] > 0) == name.startswith("dropout")
    assert (on["clipped"] > 0) == (name == "clipped")
    assert on["uplink_bytes_per_client_round"] > off["uplink_bytes_per_client_round"]
    secure, plain = verify(tmp_path / "on"), verify(tmp_path / "off")
    assert (secure.rounds, secure.chain, secure.weights_sha256) == (plain.rounds, plain.chain, on["weights_sha256"])
    assert _events(tmp_path / "on") == _events(tmp_path / "off")
    for of_secure, of_plain in zip(records_of(tmp_path / "on"), records_of(tmp_path / "off"), strict=True):
        for key in ("round", "loss", "contributors", "clipped", "joins"):
            assert of_secure[key] == of_plain[key], key


@pytest.mark.parametrize("mode", ["on", "off"])
def test_messages_are_counted_per_client_of_the_round_not_per_client_reached(
    plan: MakePlan, tmp_path: Path, mode: str
) -> None:
    """The exchange that ends a round also opens the next one, whose clients may differ."""
    simulate(plan(*VARIANTS["few"], f"secure.mode={mode}"), tmp_path / "run")
    for record in records_of(tmp_path / "run"):
        assert record["replies"] == 4
        assert record["requests"] + record["joins"] == 4


def test_the_number_of_workers_changes_no_bit(plan: MakePlan, tmp_path: Path) -> None:
    settings = ["federation.clients=9", "federation.dropout=0.2"]
    hashes = {
        simulate(plan(*settings, f"run.workers={workers}"), tmp_path / str(workers))["weights_sha256"]
        for workers in (1, 2, 5)
    }
    assert len(hashes) == 1


@pytest.mark.parametrize("name", ["forward", "few", "dropout", "tiers", "epoch", "backprop", "few delta"])
def test_a_longer_run_is_a_shorter_one_continued(plan: MakePlan, tmp_path: Path, name: str) -> None:
    settings = [setting for setting in VARIANTS[name] if not setting.startswith("rounds")]
    expected = simulate(plan(*settings, "rounds=7"), tmp_path / "whole")
    simulate(plan(*settings, "rounds=3"), tmp_path / "parts")
    resume(tmp_path / "parts", ["rounds=4"])
    continued = resume(tmp_path / "parts", ["rounds=7", "run.workers=1"])
    for key in ("weights_sha256", "rounds", "forwards", "dropouts", "skipped_rounds", "secure"):
        assert continued[key] == expected[key], key
    assert verify(tmp_path / "parts").chain == verify(tmp_path / "whole").chain
    assert _events(tmp_path / "parts") == _events(tmp_path / "whole")


@pytest.mark.parametrize("at", [1, 4, 5])
def test_a_stopped_run_continues_as_if_it_had_not_been_stopped(plan: MakePlan, tmp_path: Path, at: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        simulate(plan(), tmp_path / "run", watch=interrupt_after(at))
    assert verify(tmp_path / "run").rounds == at
    expected = simulate(plan(), tmp_path / "whole")
    resumed = resume(tmp_path / "run")
    assert (resumed["weights_sha256"], resumed["skipped_rounds"]) == (expected["weights_sha256"], 0)
    assert verify(tmp_path / "run").chain == verify(tmp_path / "whole").chain


def test_dropouts_are_part_of_the_trajectory_and_cannot_be_changed_midway(plan: MakePlan, tmp_path: Path) -> None:
    simulate(plan("rounds=2"), tmp_path / "run")
    with pytest.raises(PlanError, match="a resumed run may change"):
        resume(tmp_path / "run", ["federation.dropout=0.1"])
    assert verify(tmp_path / "run").rounds == 2


def test_the_summary_names_the_mode_of_the_sum_and_counts_dropouts(plan: MakePlan, tmp_path: Path) -> None:
    settings = plan(*VARIANTS["dropout"])
    summary = simulate(settings, tmp_path / "run")
    trajectory = trajectory_of(load_task(settings).plan, 650)
    assert summary["secure"] == "on"
    assert summary["dropouts"] == len(_dropped(trajectory)) > 5
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    contributors = sum(record["contributors"] for record in records_of(tmp_path / "run"))
    assert contributors == 12 * 9 - summary["dropouts"]
    assert summary["forwards"] == contributors * 5
    calm = simulate(plan(), tmp_path / "calm")
    assert (calm["secure"], calm["dropouts"]) == ("on", 0)


@pytest.mark.parametrize(
    "settings", [[], ["run.downlink=delta"], ["run.downlink=weights"], BACKPROP, ["secure.floor=4"]]
)
def test_a_round_with_too_few_survivors_is_skipped_and_the_run_continues(
    plan: MakePlan, tmp_path: Path, settings: list[str]
) -> None:
    changed = plan("federation.dropout=0.4", "rounds=20", *settings)
    summary = simulate(changed, tmp_path / "run")
    trajectory = trajectory_of(load_task(changed).plan, 650)
    survivors = [5 - sum(drops(trajectory, number, client) for client in range(5)) for number in range(20)]
    expected = [alive if alive >= changed.secure.floor else 0 for alive in survivors]
    records = records_of(tmp_path / "run")
    assert [record["contributors"] for record in records] == expected
    assert [record["loss"] is None for record in records] == [count == 0 for count in expected]
    assert summary["skipped_rounds"] == expected.count(0) == verify(tmp_path / "run").skipped
    assert 0 < expected.count(0) < 20
    assert any(0 < alive < 5 for alive in expected)
    assert expected.index(0) < 19 - expected[::-1].index(next(filter(None, expected[::-1])))
    assert summary["dropouts"] == sum(5 - alive for alive in survivors)
    for (number, client), event in _events(tmp_path / "run").items():
        if drops(trajectory, number, client):
            assert event == MISSING
        elif expected[number]:
            assert event == CONTRIBUTED
        else:
            assert f"{survivors[number]} of 5 clients sent a vector, too few" in event
    assert summary["forwards"] == (sum(expected) * 5 if settings != BACKPROP else sum(expected))


@pytest.mark.parametrize("dropout", [0.2, 0.5])
@pytest.mark.parametrize("few", [[], ["federation.clients=10", "federation.participation=0.4"]])
def test_the_same_clients_drop_with_and_without_the_secure_sum(
    plan: MakePlan, tmp_path: Path, dropout: float, few: list[str]
) -> None:
    settings = [f"federation.dropout={dropout}", "rounds=15", *few]
    missing: dict[str, set[tuple[int, int]]] = {}
    for mode in ("on", "off"):
        changed = plan(*settings, f"secure.mode={mode}")
        summary = simulate(changed, tmp_path / mode)
        events = _events(tmp_path / mode)
        missing[mode] = {at for at, event in events.items() if event == MISSING}
        assert summary["dropouts"] == len(missing[mode])
        assert missing[mode] == _dropped(trajectory_of(load_task(changed).plan, 650))
    assert missing["on"] == missing["off"]
    total = 15 * changed.per_round
    assert abs(len(missing["on"]) - dropout * total) < 4 * np.sqrt(total * dropout * (1 - dropout))


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
    tiers = ["federation.tiers=[{k=2, share=0.6}]", "rounds=3"]
    summary = simulate(plan(*tiers), tmp_path / "on")
    assert summary["skipped_rounds"] == 3
    assert simulate(plan(*tiers, "secure.mode=off"), tmp_path / "off")["skipped_rounds"] == 0
    assert simulate(plan(*tiers, "secure.floor=2"), tmp_path / "lower")["skipped_rounds"] == 0


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(
    "settings",
    [
        ["federation.clients=2"],
        ["federation.clients=10", "federation.participation=0.2"],
        ["federation.clients=5", "secure.floor=6"],
    ],
)
def test_a_round_smaller_than_the_floor_is_refused_in_one_line(
    cli: Cli, tiny_toml: Path, tmp_path: Path, command: str, settings: list[str]
) -> None:
    options = [word for setting in ["secure.mode=on", *settings] for word in ("--set", setting)]
    done = cli(command, tiny_toml, *options, *(["--out", tmp_path / "run"] if command == "run" else []))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: secure.floor: ")
    assert done.stderr.count("\n") == 1
    for word in ("clients", "secure.groups", "federation.participation", 'secure.mode = "off"'):
        assert word in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("threshold", [6, 2])
def test_an_impossible_threshold_is_refused_before_the_run(plan: MakePlan, tmp_path: Path, threshold: int) -> None:
    """Five clients allow three to five shares: with fewer than three, two contradicting answers could both unmask."""
    with pytest.raises(PlanError, match=r"secure\.threshold"):
        simulate(plan("rounds=3", f"secure.threshold={threshold}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("client", [0, 2, 4])
@pytest.mark.parametrize("settings", [[], BACKPROP, ['federation.level="epoch"']])
def test_a_client_whose_loss_is_not_finite_changes_no_sum(
    plan: MakePlan, tmp_path: Path, spoilt: Callable[[object], str], client: int, settings: list[str]
) -> None:
    share = iid(Seeds(0, b"").key("partition"), 60, 5)[client]
    own = [spoilt(share[0]), "federation.batch=0", "rounds=5", *settings]
    on, off = (simulate(plan(*own, f"secure.mode={mode}"), tmp_path / mode) for mode in ("on", "off"))
    assert on["weights_sha256"] == off["weights_sha256"]
    assert (on["skipped_rounds"], on["dropouts"]) == (0, 0)
    assert np.isfinite(on["train_loss"])
    assert [record["contributors"] for record in records_of(tmp_path / "on")] == [5] * 5
    assert set(_events(tmp_path / "on").values()) == {CONTRIBUTED}
    assert verify(tmp_path / "on").chain == verify(tmp_path / "off").chain
    absent = Federation(load(str(tmp_path / "on" / "plan.toml")), tmp_path / "absent")
    absent.unheard = lambda number, asked: number == client and isinstance(asked, MaskedRequest)
    for _ in range(5):
        absent.play()
    absent.journal.close()
    assert verify(tmp_path / "absent").chain == verify(tmp_path / "on").chain


class Federation(RoundsByHand):
    """Loses the messages, or the replies to them, that a test names."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, folder)
        self.unheard: Callable[[int, Request], bool] = lambda _client, _asked: False
        self.unanswered: Callable[[int, Request], bool] = lambda _client, _asked: False

    def carry(self, client: int, message: bytes) -> bytes | None:
        asked = decode_request(message)
        if self.unheard(client, asked):
            return None
        reply = self.clients[client].answer(message)
        return None if self.unanswered(client, asked) else reply


def _asks(kind: type[Request], *clients: int) -> Callable[[int, Request], bool]:
    """A predicate: is this a message of that kind to one of those clients?"""
    return lambda client, asked: client in clients and isinstance(asked, kind)


@pytest.mark.parametrize("downlink", ["scalars", "delta", "weights"])
@pytest.mark.parametrize("way", ["unheard", "unanswered"])
@pytest.mark.parametrize("lost", [MaskedRequest, Turn], ids=["too few vectors", "too few shares"])
def test_an_abandoned_sum_is_a_round_in_which_nobody_answered(
    plan: MakePlan, tmp_path: Path, downlink: str, way: str, lost: type[Request]
) -> None:
    settings = [f"run.downlink={downlink}", "rounds=9"]
    secure = Federation(plan(*settings), tmp_path / "secure")
    plain = Federation(plan(*settings, "secure.mode=off"), tmp_path / "plain")
    bad = {2, 5} if lost is Turn else {2, 5, 6}
    unopened = {number + 1 for number in bad} if lost is Turn else set()  # a turn ends a round and opens the next
    for number in range(9):
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


@pytest.mark.parametrize("downlink", ["scalars", "delta", "weights"])
@pytest.mark.parametrize("way", ["unheard", "unanswered"])
@pytest.mark.parametrize("lost", [Hello, Turn, MaskedRequest])
def test_a_client_that_misses_a_message_comes_back(
    plan: MakePlan, tmp_path: Path, downlink: str, way: str, lost: type[Request]
) -> None:
    """Two of five clients lose one kind of message in three rounds. The others are summed, and the two return."""
    federation = Federation(plan(f"run.downlink={downlink}", "rounds=9"), tmp_path / "run")
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


def test_a_client_that_takes_part_now_and_then_is_asked_for_keys_only_once(plan: MakePlan, tmp_path: Path) -> None:
    changed = plan("federation.clients=10", "federation.participation=0.5", "rounds=16")
    federation = Federation(changed, tmp_path / "run")
    asked: Counter[int] = Counter()

    def count(client: int, message: Request) -> bool:
        asked[client] += isinstance(message, Hello)
        return False

    federation.unheard = count
    for _ in range(15):
        assert set(federation.play().participation.values()) == {CONTRIBUTED}
    federation.journal.close()
    assert asked == dict.fromkeys(range(10), 1)


@pytest.mark.parametrize("way", ["unheard", "unanswered"])
@pytest.mark.parametrize("kind", [Hello, Turn, MaskedRequest])
def test_a_client_that_is_never_reached_holds_nobody_up(
    plan: MakePlan, tmp_path: Path, way: str, kind: type[Request]
) -> None:
    federation = Federation(plan("rounds=8"), tmp_path / "run")
    setattr(federation, way, _asks(kind, 2))
    for _ in range(7):
        played = federation.play()
        assert played.participation[2] == MISSING
        assert [played.participation[client] for client in (0, 1, 3, 4)] == [CONTRIBUTED] * 4
    federation.journal.close()
    assert verify(tmp_path / "run").skipped == 0


def test_failing_to_open_the_next_round_does_not_cost_this_one(plan: MakePlan, tmp_path: Path) -> None:
    changed = plan("federation.clients=10", "federation.participation=0.3", "rounds=9")
    federation = Federation(changed, tmp_path / "run")
    now, then = (set(choose_clients(federation.trajectory, number)) for number in (0, 1))
    late = min(then - now)
    federation.unheard = _asks(Hello, late)
    assert federation.play().participation == dict.fromkeys(now, CONTRIBUTED)
    federation.unheard = _asks(Hello)
    assert federation.play().participation == dict.fromkeys(then, CONTRIBUTED)
    federation.journal.close()


def _asking(federation: Federation, message: Message, told: list[str]) -> Reply:
    return decode_reply(replace(federation.clients[0], tell=told.append).answer(encode(message)))


def test_a_client_answers_only_in_its_own_mode(plan: MakePlan, tmp_path: Path) -> None:
    secure = Federation(plan(), tmp_path / "secure")
    plain = Federation(plan("secure.mode=off"), tmp_path / "plain")
    request = open_round(plain.trajectory, plain.present, [list(range(5))], plain.downlink)[0][0]
    assert decode_reply(plain.clients[0].answer(encode(request))).round == request.round
    told = list[str]()
    assert _asking(secure, request, told) == Abstention(0)
    assert told == ["abstained: a RoundRequest, but this client's secure.mode is on"]
    opening = Opening(0, tuple(range(5)), 3, 3, ())
    asked: list[Hello | Turn | MaskedRequest] = [
        Hello(0),
        Turn(None, opening),
        Turn(Unmask(0, tuple(range(5)), ()), None),
        MaskedRequest(request, tuple(range(5)), bytes(32), b""),
    ]
    for message in asked:
        assert _asking(plain, message, told) == Abstention(0)
        assert told[-1] == f"abstained: a {type(message).__name__}, but this client's secure.mode is off"
    for federation in (secure, plain):
        federation.journal.close()


def test_a_server_in_the_other_mode_gets_no_sum(plan: MakePlan, tmp_path: Path) -> None:
    secure = Federation(plan(), tmp_path / "secure")
    plain = Federation(plan("secure.mode=off"), tmp_path / "plain")
    secure.aggregation, plain.aggregation = plain.aggregation, secure.aggregation
    for federation in (secure, plain):
        played = federation.play()
        assert played.metrics["contributors"] == 0
        assert CONTRIBUTED not in played.participation.values()
        federation.journal.close()
    assert secure.present.state.weights_hash() == plain.present.state.weights_hash()


def test_a_client_sends_masked_values_in_a_secure_run(plan: MakePlan, tmp_path: Path) -> None:
    """The server sees different bytes in every run, although the sum is the same."""
    seen: list[dict[int, bytes]] = []
    for name in ("first", "second", "plain"):
        federation = Federation(plan(*(["secure.mode=off"] if name == "plain" else [])), tmp_path / name)
        sent: dict[int, bytes] = {}
        for number, client in enumerate(federation.clients):
            answer = client.answer

            def listen(
                data: bytes,
                answer: Callable[[bytes], bytes] = answer,
                number: int = number,
                sent: dict[int, bytes] = sent,
            ) -> bytes:
                reply = answer(data)
                if isinstance(decode_request(data), MaskedRequest | RoundRequest):
                    sent[number] = reply
                return reply

            object.__setattr__(client, "answer", listen)
        federation.play()
        federation.journal.close()
        seen.append(sent)
    first, second, plain = seen
    for number in range(5):
        assert len({first[number], second[number], plain[number]}) == 3
        assert len(first[number]) == len(second[number]) == len(plain[number])


AGREED = {
    "agreement": [],
    "agreement groups": ["federation.clients=10", "secure.groups=2", "secure.group_seeds=own"],
    "agreement dropout": ["federation.clients=12", "federation.dropout=0.1", "rounds=8"],
}


@pytest.mark.parametrize("name", AGREED)
def test_the_malicious_server_mode_gives_the_same_weights(plan: MakePlan, tmp_path: Path, name: str) -> None:
    agreed, plain = (
        simulate(plan(*AGREED[name], f"secure.mode={mode}"), tmp_path / mode) for mode in ("malicious-server", "off")
    )
    assert agreed["skipped_rounds"] == plain["skipped_rounds"] == 0
    for key in ("weights_sha256", "trajectory_digest", "dropouts"):
        assert agreed[key] == plain[key], key
    assert agreed["secure"] == "malicious-server"
    assert verify(tmp_path / "malicious-server").chain == verify(tmp_path / "off").chain


@pytest.mark.parametrize("name", ["groups own median", "groups epoch", "dropout groups"])
def test_a_longer_run_in_groups_is_a_shorter_one_continued(plan: MakePlan, tmp_path: Path, name: str) -> None:
    settings = [setting for setting in VARIANTS[name] if not setting.startswith("rounds")]
    expected = simulate(plan(*settings, "rounds=6"), tmp_path / "whole")
    simulate(plan(*settings, "rounds=3"), tmp_path / "parts")
    continued = resume(tmp_path / "parts", ["rounds=6", "secure.mode=off"])
    assert continued["weights_sha256"] == expected["weights_sha256"]
    assert verify(tmp_path / "parts").chain == verify(tmp_path / "whole").chain


@pytest.mark.parametrize("setting", ["secure.groups=1", "secure.group_seeds=own", "secure.combine=median"])
def test_the_groups_of_a_run_cannot_be_changed_midway(plan: MakePlan, tmp_path: Path, setting: str) -> None:
    simulate(plan("federation.clients=8", "secure.groups=2", "rounds=1"), tmp_path / "run")
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


@pytest.mark.parametrize("seeds", ["own", "shared"])
def test_a_group_without_a_sum_costs_that_group_only(plan: MakePlan, tmp_path: Path, seeds: str) -> None:
    changed = plan("federation.clients=9", "secure.groups=3", f"secure.group_seeds={seeds}", "rounds=5")
    federation = Federation(changed, tmp_path / "run")
    for number in range(4):
        lost = choose_groups(federation.trajectory, number)[number % 3]
        federation.unheard = _asks(MaskedRequest, *lost)
        played = federation.play()
        assert played.metrics["contributors"] == 6
        assert played.metrics["silent"] == {"vector": 3}
        assert {client for client, event in played.participation.items() if event != CONTRIBUTED} == set(lost)
        assert len(federation.journal.entry(number).outcome().groups) == 2
    federation.journal.close()
    assert verify(tmp_path / "run").skipped == 0


def test_after_shares_were_released_in_vain_the_run_continues_from_the_same_weights(
    plan: MakePlan, tmp_path: Path
) -> None:
    """Round 0 ends without enough answers, and round 1 is never opened. Round 2 starts from the same weights."""
    federation = Federation(plan("rounds=6"), tmp_path / "run")
    plain = Federation(plan("rounds=6", "secure.mode=off"), tmp_path / "plain")
    federation.unanswered = lambda _client, asked: isinstance(asked, Turn) and asked.unmask is not None
    plain.unheard = lambda _client, _asked: True
    assert [federation.play().metrics["contributors"], plain.play().metrics["contributors"]] == [0, 0]
    federation.unanswered = lambda _client, _asked: False
    federation.play()
    plain.play()
    for each in (federation, plain):
        assert [each.journal.entry(number).outcome().kind for number in (0, 1)] == ["skipped"] * 2
    plain.unheard = lambda _client, _asked: False
    for _ in range(3):
        assert federation.play().metrics["contributors"] == plain.play().metrics["contributors"] == 5
        assert federation.present.state.weights_hash() == plain.present.state.weights_hash()
    federation.journal.close()
    plain.journal.close()
    assert verify(tmp_path / "run").chain == verify(tmp_path / "plain").chain


@pytest.mark.parametrize("mode", ["on", "off"])
def test_an_update_beyond_its_cap_is_skipped_and_says_so(plan: MakePlan, tmp_path: Path, mode: str) -> None:
    settings = ["update.optimizer=sgd", f"secure.mode={mode}", "rounds=8", "update.ema=0"]
    free = Federation(plan(*settings), tmp_path / "free")
    lengths = []
    for _ in range(8):
        start = free.present.state.weights
        free.play()
        lengths.append(float(np.linalg.norm(free.present.state.weights.astype(np.float64) - start)))
    free.journal.close()
    cap = sorted(lengths)[5]
    capped = Federation(plan(*settings, f"update.norm_max={cap!r}"), tmp_path / "capped")
    refused = []
    for number in range(8):
        before = capped.present.state
        played = capped.play()
        outcome = capped.journal.entry(number).outcome()
        moved = float(np.linalg.norm(capped.present.state.weights.astype(np.float64) - before.weights))
        assert moved <= cap
        assert (outcome.kind == "skipped") == bool(played.metrics.get("refused_update"))
        if outcome.kind == "skipped":
            refused.append(number)
            assert capped.present.state is before
            assert (played.metrics["loss"], played.metrics["contributors"]) == (None, 0)
    capped.journal.close()
    assert refused
    assert len(refused) < 8
    assert verify(tmp_path / "capped").skipped == len(refused)


def test_a_stopped_run_with_refused_updates_continues_as_if_it_had_not_been_stopped(
    plan: MakePlan, tmp_path: Path
) -> None:
    settings = ["update.optimizer=sgd", "run.snapshot_every=1"]
    for seed, cap in product(range(5), (0.05, 0.1, 0.15, 0.2)):  # until the cap stops one round and lets another pass
        settings[2:], path = [f"seed={seed}", f"update.norm_max={cap}"], tmp_path / f"whole{seed}-{cap}"
        whole = simulate(plan(*settings, "rounds=8"), path)
        if 0 < whole["skipped_rounds"] <= 3:  # after more in a row clients stop answering, but restarted ones would not
            break
    assert 0 < whole["skipped_rounds"] <= 3
    for at in (1, 3, 5):
        simulate(plan(*settings, f"rounds={at}"), tmp_path / str(at))
        resumed = resume(tmp_path / str(at), ["rounds=8"])
        assert (resumed["weights_sha256"], resumed["skipped_rounds"]) == (
            whole["weights_sha256"],
            whole["skipped_rounds"],
        )
        assert verify(tmp_path / str(at)).chain == verify(path).chain
