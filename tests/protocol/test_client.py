"""A client that was written from docs/protocol.md alone takes part in real runs, over TLS, with clients of the package
and in secure sums. It takes later rosters, and abstains from nonsense."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from baffle.aggregation.context import signed
from baffle.aggregation.messages import Hello, Turn
from baffle.client.abstaining import abstention
from baffle.client.worker import Worker
from baffle.core.arrays import F32
from baffle.core.messages import CatchUp, Message, RoundRequest, decode, encode
from baffle.core.ring import RingVector, add
from baffle.core.update import State
from baffle.data.partition import share_out
from baffle.data.sources import load as load_source
from baffle.journal.audit import verify
from baffle.journal.store import Journal
from baffle.network.joining import BEHIND, UNREADY, Halt, Introduce, Introduction, NewRoster, Openings, RosterTaken
from baffle.network.keys.authority import make_keys, renew_roster, revoke_clients
from baffle.network.keys.folders import ClientKeys
from baffle.network.keys.rosters import Roster, load_roster
from baffle.network.member.equipment import Equipment, with_plan
from baffle.network.member.member import Member
from baffle.network.member.policy import Policy
from baffle.network.server.serve import serve
from baffle.plan import Plan, change, load, parse
from baffle.plan.sections import LARGEST
from baffle.server.recorder import Summary
from baffle.statement import commitment_text, shared_plan
from tests.protocol.client import Member as IndependentMember
from tests.support.environments import without
from tests.support.links import HOST, Client, linked, new_keys, until

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0

PROGRAM = without("baffle", "msgspec") + "import runpy\nrunpy.run_module('tests.protocol.client', run_name='__main__')"

PLAN = """
name = "softmax"
rounds = {rounds}
task = {{init = "numpy", model = {{name = "softmax"}}}}
federation = {{clients = 4, batch = 16, weighting = "uniform"}}
probe = {{k = {k}, distribution = "{distribution}"}}
secure.mode = "{mode}"
run.deadline_seconds = 60.0
"""

LIGHT = 'update = {optimizer = "momentum", ema = 0.0}'
"""With this and 48 directions, the state is shorter than the outcomes of 24 rounds."""


class Independent:
    """The client of this folder as a process that cannot import the package."""

    def __init__(self, folder: Path, number: int, plan: Plan, address: str, *options: object) -> None:
        source = load_source(plan.task.data, None)
        own = source.train.batch(share_out(plan, source)[number])
        np.savez(folder / f"samples-{number}.npz", x=np.asarray(own.x).reshape(len(own.y), -1), y=own.y)
        words = (address, folder / "keys" / f"client-{number}", folder / f"samples-{number}.npz", *options)
        command, pipe = [sys.executable, "-c", PROGRAM, *map(str, words)], subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)

    def end(self) -> dict[str, Any]:
        """Wait for what it says at its end: the hash of its weights, the vector that it contributed to each round, and
        how it was brought up to date."""
        out, log = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, log
        assert set(log.splitlines()) <= {"abstained: it drops out of this round on purpose"}
        said: dict[str, Any] = json.loads(out)
        return said | {"sent": {int(number): vector for number, vector in said["sent"].items()}}


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that end with the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@dataclass(frozen=True)
class Recording(Worker):
    """A worker of the package whose vectors are kept."""

    kept: dict[int, list[int]] = field(default_factory=dict)

    def vector(self, round_number: int, weights: F32, optimizer: State = ()) -> RingVector:
        vector = super().vector(round_number, weights, optimizer)
        self.kept[round_number] = vector.tolist()
        return vector


def ordinary(folder: Path, keys: ClientKeys, kept: dict[int, list[int]]) -> Member:
    equip = with_plan(keys.number, None, part=True)

    def recording(plan: Plan, most_weights: int = LARGEST) -> Equipment:
        made = equip(plan, most_weights)
        fields = {name: getattr(made.worker, name) for name in made.worker.__dataclass_fields__}
        return made._replace(worker=Recording(**fields, kept=kept))

    return Member(keys, folder / f"state-{keys.number}", recording, policy=Policy(without_privacy=True))


@pytest.mark.parametrize(
    ("mode", "distribution", "steps"),
    [("on", "rademacher", 1), ("malicious-server", "gaussian", 1), ("malicious-server", "rademacher", 3)],
)
def test_it_takes_part_in_secure_sums_with_a_dropout_and_catches_up(
    tmp_path: Path, started: list[subprocess.Popen[str]], mode: str, distribution: str, steps: int
) -> None:
    """Two clients are the package's and two are not. One of the latter drops out of round 2, after it has shared its
    secrets: all others release shares of its key, and it needs two outcomes in round 3."""
    local = [f"federation.local_steps={steps}", "federation.warm_up=2", "update.schedule=cosine"] if steps > 1 else []
    plan = change(parse(PLAN.format(rounds=6, k=8, mode=mode, distribution=distribution)), local)
    keys, run = new_keys(tmp_path / "keys", 4), tmp_path / "run"
    vectors: list[dict[int, list[int]]] = [{}, {}]
    summaries: list[Summary] = []
    with linked(keys, seconds=plan.run.deadline_seconds) as server, ExitStack() as clients:
        serving = partial(serve, plan, run, server.link, keys.server.roster, least=4)
        thread = Thread(target=lambda: summaries.append(serving()), daemon=True)
        thread.start()
        for own, kept in zip(keys.clients[:2], vectors, strict=True):
            clients.enter_context(Client(server.address, own, answer=ordinary(tmp_path, own, kept).answer))
        options: dict[int, tuple[object, ...]] = {2: (), 3: ("--abstain", 2)}
        independent = [Independent(tmp_path, number, plan, server.address, *own) for number, own in options.items()]
        started += [client.process for client in independent]
        ends = [client.end() for client in independent]
        thread.join(PATIENCE)
    (summary,) = summaries
    assert (summary["rounds"], summary["skipped_rounds"]) == (6, 0)
    assert {end["weights"] for end in ends} == {summary["weights_sha256"]} == {verify(run).weights_sha256}
    vectors += [end["sent"] for end in ends]
    assert [sorted(sent) for sent in vectors] == [[0, 1, 2, 3, 4, 5]] * 3 + [[0, 1, 3, 4, 5]]
    with Journal.open(run / "journal.sqlite") as journal:
        for outcome in (entry.outcome() for entry in journal.entries(0)):
            contributed = [np.array(sent[outcome.round], np.uint32) for sent in vectors if outcome.round in sent]
            assert add(contributed).view(np.int32)[:-4].tolist() == outcome.groups[0].numbers().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["on", "malicious-server"])
def test_it_comes_late_to_a_run_of_real_processes(
    tmp_path: Path, started: list[subprocess.Popen[str]], start: Callable[..., subprocess.Popen[str]], mode: str
) -> None:
    """A server and two clients are the package's, from the command line. One client of this folder is there from the
    beginning; another comes later, enters with the next epoch, and takes the state that the epoch begins with."""
    plan_file, run = tmp_path / "plan.toml", tmp_path / "run"
    plan_file.write_text(PLAN.format(rounds=100, k=48, mode=mode, distribution="rademacher") + LIGHT)
    new_keys(tmp_path / "keys", 4)
    plan, entered = load(str(plan_file)), tmp_path / "entered"
    server = tmp_path / "keys" / "server"
    start("serve", plan_file, "--keys", server, "--out", run, "--host", HOST, "--port", 0, "--least", 3)
    until(lambda: "listening at" in _log(run / "serve.log"), PATIENCE)
    address = re.findall(r"listening at (\S+)", _log(run / "serve.log"))[0]
    for number in range(2):
        folders = ("--keys", tmp_path / "keys" / f"client-{number}", "--state", tmp_path / f"state-{number}")
        start("join", address, *folders, "--part", "--plan", plan_file)
    independent = [Independent(tmp_path, 2, plan, address, "--slow-until", entered)]
    started.append(independent[0].process)
    until(lambda: len(_log(run / "metrics.jsonl").splitlines()) >= 24, PATIENCE)
    independent.append(Independent(tmp_path, 3, plan, address, "--entered", entered))
    started.append(independent[1].process)
    ends = [client.end() for client in independent]
    until(lambda: (run / "summary.json").exists(), PATIENCE)
    summary = json.loads((run / "summary.json").read_text())
    assert {end["weights"] for end in ends} == {summary["weights_sha256"]} == {verify(run).weights_sha256}
    assert 24 <= min(ends[1]["sent"]) <= max(ends[1]["sent"]) == plan.rounds - 1
    assert "snapshot" in ends[1]["catch_ups"]
    with Journal.open(run / "journal.sqlite") as journal:
        assert len(journal.statements.epochs()) == 2


def _log(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# What no run asks it

SMALL = 'federation = {clients = 3, batch = 8}\nring.n_max = 9\ntask = {init = "numpy", model = {name = "softmax"}}'
REQUEST = RoundRequest(7, bytes(32), bytes(32), bytes(32), CatchUp("outcomes", 0, ()))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", 3, ["localhost"])
    return tmp_path / "keys"


@pytest.fixture
def member(keys: Path) -> IndependentMember:
    return IndependentMember(keys / "client-1", np.zeros((20, 64), np.float32), np.zeros(20, np.int64))


def introduce(roster: Roster, plan: str = SMALL) -> Introduce:
    return Introduce(shared_plan(parse(plan)).to_toml(), roster.number, roster.hash(), 0)


def test_it_takes_a_later_roster_and_never_goes_back(keys: Path, member: IndependentMember) -> None:
    first = load_roster(keys / "client-1")
    later = renew_roster(keys, 5000)
    (keys / "client-1" / "roster.json").write_bytes(first.encode())
    assert member.answer(encode(introduce(later))) == BEHIND
    assert member.answer(encode(NewRoster(later.encode()))) == encode(RosterTaken())
    assert load_roster(keys / "client-1") == later
    question = introduce(later)
    said = decode(member.answer(encode(question)), Introduction)
    text = commitment_text(later.server_key, question.plan, later.hash(), 0, said.commitment)
    assert signed(later.directory()[1], said.signature, text)
    assert decode(member.answer(encode(question)), Introduction).commitment == said.commitment
    for refused in (introduce(first), NewRoster(first.encode()), NewRoster(later.encode()[:-1])):
        assert member.answer(encode(refused)) == abstention(encode(refused))


def test_a_roster_without_its_key_is_refused(keys: Path, member: IndependentMember) -> None:
    without = NewRoster(revoke_clients(keys, [1]).encode())
    assert member.answer(encode(without)) == abstention(encode(without))


@pytest.mark.parametrize("settings", ["privacy = {noise = 1, clip = 1, sharers = 3}", 'secure.mode = "off"'])
def test_it_abstains_from_plans_that_it_cannot_do(keys: Path, member: IndependentMember, settings: str) -> None:
    plan = SMALL.replace("batch = 8}", f'batch = 8, weighting = "uniform"}}\n{settings}')
    refused = encode(introduce(load_roster(keys / "client-1"), plan))
    assert member.answer(refused) == abstention(refused)


@pytest.mark.parametrize("asked", [Hello(3), Turn(None, None), REQUEST, Halt(REQUEST), Openings(bytes(32), b"")])
def test_without_a_run_it_is_not_ready(member: IndependentMember, asked: Message) -> None:
    assert member.answer(encode(asked)) == UNREADY


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x91\xa5hello", b"\x92\xa5hello\xd3" + b"\xff" * 8, b"\x91" * 5000])
def test_nonsense_is_an_abstention(member: IndependentMember, body: bytes) -> None:
    assert member.answer(body) == abstention(body)
