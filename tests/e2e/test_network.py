"""Federations of real processes on this machine, with and without PyTorch: some are killed, stopped or cannot write."""

import json
import resource
import shutil
import signal
import time
from pathlib import Path

import msgspec
import pytest

from baffle.export import export_plan
from baffle.journal.audit import verify
from baffle.journal.store import Journal
from baffle.network.keys.authority import make_keys, sign_roster
from baffle.network.keys.folders import load_identity
from baffle.network.keys.rosters import load_roster
from baffle.plan import change, load
from baffle.runtime.onnx.model_folder import read_exported
from baffle.simulation import repeat
from tests.plan.test_arithmetic import MINE
from tests.support.command_line import setting
from tests.support.networks import Network, listening

pytest.importorskip("onnxruntime")


@pytest.mark.slow
def test_a_mixed_federation_learns_and_turns_strangers_away(network: Network) -> None:
    """Two clients on PyTorch, one on ONNX Runtime, and three that must be refused: a client that insists on another
    plan, one whose key is not on the roster, and one that trusts another server. Directions of a networked run are
    never the same twice. With an exact head each of them learns, whatever its directions are."""
    settings = ["rounds=20", "probe.k=12", "run.deadline_seconds=120", "run.evaluate_every=10"]
    network.plan = ["digits-head", *setting(*settings)]
    export_plan("digits-head", network.folder / "model")  # before the server has settled what the plan leaves open
    network.serve("--least", "3")
    network.join(0)
    network.join(1, "--plan", *network.plan)
    network.join(2, "--model", network.folder / "model")
    pinned = network.join(3, "--plan", "digits-head", "--set", "probe.sigma=0.1")
    foreign = network.folder / "foreign"
    make_keys(foreign, 4, ["127.0.0.1"])
    unknown = network.join(0, name="unknown", keys=with_trust_in(network.keys, foreign / "client-0"))
    distrusting = network.join(1, name="distrusting", keys=foreign / "client-1")
    network.until(lambda: network.rounds() >= 1)

    network.until(lambda: "refuses this" in network.log(unknown))
    network.until(lambda: "will not take part" in network.log(pinned))
    network.until(lambda: "client 3 does not take part" in network.log("server"))
    assert network.ended(distrusting) == 2
    assert "was not issued by" in network.log(distrusting)

    network.require_end(clients=3)
    summary = json.loads((network.run / "summary.json").read_text())
    assert (summary["rounds"], summary["skipped_rounds"]) == (20, 0)
    assert summary["test_accuracy_last"] > 0.5
    losses = [json.loads(line)["loss"] for line in (network.run / "metrics.jsonl").read_text().splitlines()]
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.5
    replayed = verify(network.run).weights_sha256
    assert {summary["weights_sha256"], *map(network.held, range(3))} == {replayed}


def with_trust_in(keys: Path, foreign: Path) -> Path:
    """A foreign client's folder that trusts the server of `keys`, and still has the foreign client's own keys. The
    server must be the one that the roster names, so the foreign authority signs a roster that names it."""
    shutil.copy(keys / "client-0" / "ca.pem", foreign / "ca.pem")
    server = load_roster(keys / "client-0").server
    named = msgspec.structs.replace(load_roster(foreign), server=server, signature="")
    authority = load_identity(foreign.parent / "authority.key")
    (foreign / "roster.json").write_bytes(sign_roster(named, authority).encode())
    return foreign


@pytest.mark.slow
@pytest.mark.parametrize("insecure", [False, True])
def test_a_run_can_be_repeated_in_one_process(network: Network, tiny_toml: Path, insecure: bool) -> None:
    network.insecure = insecure
    network.begin(tiny_toml, "rounds=4", 'task.model={name="lenet", channels=[4,4]}')
    assert network.ended("server") == 0, network.log("server")
    repeated = repeat(network.run, network.folder / "repeated")
    assert verify(network.run).weights_sha256 == repeated["weights_sha256"]
    assert {network.ended(f"client-{number}") for number in range(4)} == {0}
    assert all(network.log(f"client-{number}").endswith(": the run is over\n") for number in range(4))
    assert set(map(network.held, range(4))) == {repeated["weights_sha256"]}


@pytest.mark.slow
def test_a_federation_survives_kills(network: Network, tiny_toml: Path) -> None:
    """A client is killed and restarted, another comes late, and the server is killed and restarted. The run still ends,
    and everybody holds its last weights."""
    export_plan(str(tiny_toml), network.folder / "model")
    model = ("--model", network.folder / "model")
    network.begin(tiny_toml, "rounds=10000", "run.deadline_seconds=60", clients=0, least=3)
    for number in range(2):
        network.join(number, *model)
    network.join(2)
    network.until(lambda: network.rounds() >= 2)

    network.kill("client-1")
    network.join(1, *model)
    network.join(3, *model)
    network.until(lambda: network.log("server").count("client 1 takes part") == 2)
    network.until(lambda: "client 3 takes part" in network.log("server"))
    before = network.rounds()
    network.until(lambda: network.rounds() > before)

    network.kill("server")
    network.until(lambda: not listening(network.port))
    rounds = network.start_again_and_end()
    summary = json.loads((network.run / "summary.json").read_text())
    assert summary["rounds"] == rounds
    assert summary["skipped_rounds"] < 10
    replayed = verify(network.run).weights_sha256
    assert {summary["weights_sha256"], *map(network.held, range(4))} == {replayed}


LIMIT = 150_000  # bytes: enough for logs and plans, and for a few rounds of the journal


def limit(network: Network, name: str, size: int) -> None:
    resource.prlimit(network.processes[name].pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.slow
def test_a_federation_goes_on_when_there_is_room(network: Network, tiny_toml: Path) -> None:
    """First the server's journal has no room, then a client can write nothing at all. No round is skipped."""
    network.begin(tiny_toml, "rounds=30", "run.snapshot_every=1", "run.deadline_seconds=20", clients=0)
    limit(network, "server", LIMIT)
    for number in range(4):
        network.join(number)
    network.until(lambda: "the run waits until there is room" in network.log("server"))
    waits_at = network.rounds()
    assert 0 < waits_at < 30
    assert "journal.sqlite cannot be written: File too large; the run waits" in network.log("server")
    limit(network, "client-2", 0)
    limit(network, "server", resource.RLIM_INFINITY)
    network.until(lambda: network.rounds() >= waits_at + 3)
    assert "there is room on the disk again; the run goes on" in network.log("server")
    limit(network, "client-2", resource.RLIM_INFINITY)

    network.require_end()
    assert network.log("server").count("the run waits until there is room") == 1
    replayed = verify(network.run)
    assert (replayed.rounds, replayed.skipped) == (30, 0)
    assert set(map(network.held, range(4))) == {replayed.weights_sha256}
    with Journal.open(network.run / "journal.sqlite") as journal:
        contributions = journal.participation.contributions(4)
        assert contributions.pop(2) < 30
        assert set(contributions.values()) == {30}
        assert journal.participation.last_contributions(4)[2] > waits_at + 2
    rounds = [json.loads(line)["round"] for line in (network.run / "metrics.jsonl").read_text().splitlines()]
    assert rounds == list(range(30))


def hold_up(network: Network) -> None:
    """Let client 3 stand still, and the server wait for it in the middle of a round."""
    network.processes["client-3"].send_signal(signal.SIGSTOP)
    before = -1
    while before != network.rounds():  # until the server has no answer of client 3 left
        before = network.rounds()
        time.sleep(2)


@pytest.mark.slow
def test_client_and_server_are_stopped_in_the_middle_of_a_round_and_started_again(
    network: Network, tiny_toml: Path
) -> None:
    # A deadline is far longer than the test waits for anything: nothing goes on because a deadline has passed.
    network.begin(tiny_toml, "rounds=10000", "run.deadline_seconds=600")
    network.until(lambda: network.rounds() >= 3)

    hold_up(network)
    played = network.rounds()
    network.processes["client-3"].send_signal(signal.SIGTERM)
    network.processes["client-3"].send_signal(signal.SIGCONT)
    assert network.ended("client-3") == 0
    assert network.log("client-3").splitlines()[-1].endswith("stopped by SIGTERM; the same command joins again")
    network.until(lambda: network.rounds() > played + 1)
    assert "client 3 has left" in network.log("server")
    network.join(3)
    network.until(lambda: network.log("server").count("client 3 takes part") == 2)

    hold_up(network)
    network.stop_server()
    assert network.log("server").splitlines()[-1].endswith("stopped by SIGTERM; the same command continues the run")
    assert "Traceback" not in network.log("server")
    for number in range(3):
        network.until(lambda number=number: "(the server stops)" in network.log(f"client-{number}"))  # type: ignore[misc]
    network.processes["client-3"].send_signal(signal.SIGCONT)
    rounds = network.start_again_and_end()
    replayed = verify(network.run)
    assert replayed.rounds == rounds
    assert set(map(network.held, range(4))) == {replayed.weights_sha256}
    assert all(network.log(f"client-{number}").count("connected to") >= 2 for number in range(4))


@pytest.mark.slow
def test_a_model_from_elsewhere_needs_its_owners_approval(tiny_toml: Path, network: Network) -> None:
    """N4, by the commands: the hash that `baffle export` prints, as an option or in the policy."""
    model = network.folder / "model"
    export_plan(str(tiny_toml), model, ["task.init=numpy"])
    sha256, policy = read_exported(model).sha256, network.folder / "policy.toml"
    policy.write_text(f'least_batch = 0\nlargest_batch = 1.0\nmodels = ["{sha256}"]\n')
    onnx = ('task.model={name="onnx"}', f'run.model="{model}"', "federation.batch=8")
    network.begin(tiny_toml, *onnx, clients=0, least=3)
    network.join(3, "--model", model, "--model-hash", "0" * 64)
    network.join(0, "--model", model, "--model-hash", sha256)
    network.join(1, "--model", model, "--model-hash", sha256)
    network.until(lambda: "this client's owner has not approved it" in network.log("client-3"))
    network.join(2, "--model", model, "--policy", policy)
    network.require_end(clients=3)
    assert sha256 in network.log("client-3")


@pytest.mark.slow
def test_functions_of_a_plan_run_where_owners_have_said_so_also_on_the_edge(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer, a schedule and a distribution, in rounds of several steps. Client 3 has the plan and has not agreed
    to its functions, client 2 runs an exported model on ONNX Runtime."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    own = ('update={optimizer="mine:heavy", schedule="mine:falling"}', 'probe.distribution="mine:ternary"')
    plan, model = tmp_path / "own.toml", tmp_path / "model"
    plan.write_text(
        'rounds = 6\ntask = {init = "numpy", model = {name = "softmax"}}\nprobe.k = 4\nfederation = {clients = 4, '
        'batch = 8, local_steps = 2, warm_up = 1}\nsecure.mode = "on"\n'
    )
    plan.write_text(change(load(str(plan)), own).to_toml())
    export_plan(str(plan), model)
    network.begin(plan, clients=0, least=3)
    network.join(3, "--plan", plan)
    for number in (0, 1):
        network.join(number, "--plan", plan, "--own-code")
    network.join(2, "--plan", plan, "--own-code", "--model", model)
    network.until(lambda: "give --own-code" in network.log("client-3"))
    network.require_end(clients=3)
    replayed = verify(network.run, own_code=True)
    assert set(map(network.held, range(3))) == {replayed.weights_sha256}
    assert repeat(network.run, tmp_path / "again", own_code=True)["weights_sha256"] == replayed.weights_sha256
