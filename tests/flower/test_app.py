"""BAFFLE as a Flower App: the real ServerApp and ClientApp, without Flower's processes between them."""

import fcntl
import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from baffle.aggregation.client.marks import MarksFile
from baffle.aggregation.messages import Advertisement, Hello
from baffle.core import messages as core
from baffle.core.messages import Abstention, decode, encode
from baffle.errors import MessageError, PlanError
from baffle.network.joining import Begin, Introduction, Ready, Salted, Unready
from baffle.network.keys.authority import make_keys
from baffle.network.keys.folders import ClientKeys
from baffle.network.member.member import Member
from baffle.plan import Plan, arithmetic
from baffle.simulation import repeat
from baffle.statement import require_signed_commitments
from tests.support.server_by_hand import ServerByHand

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common.serde import context_from_proto, context_to_proto
from flwr.supercore.object_ref import validate

from baffle.flower import app
from baffle.flower.app import Delivery, answer, client, server
from baffle.flower.lines import Me, Who
from tests.support.grids import Nodes


class SuperNodes(Nodes):
    """SuperNodes without a network, with real messages and contexts. Between messages each node keeps its context in
    Flower's encoding, as a SuperNode does."""

    def __init__(self, contexts: dict[int, Context]) -> None:
        super().__init__(dict.fromkeys(contexts, self._answer))
        self.contexts = {node: context_to_proto(context) for node, context in contexts.items()}
        self.actions: list[str] = []

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        self.actions.append(message.metadata.message_type)
        context = context_from_proto(self.contexts[node])
        reply = client(message, context)
        self.contexts[node] = context_to_proto(context)
        return reply


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", 3, ["localhost"])
    return tmp_path / "keys"


Config = dict[str, bool | float | int | str]


@pytest.fixture
def config(keys: Path, tmp_path: Path, tiny_toml: Path) -> Config:
    folders = {"keys": str(keys), "out": str(tmp_path / "run"), "state": ""}
    return {"plan": str(tiny_toml), "settings": "secure.mode=on rounds=3", "part": True, **folders}


def play(config: Config, nodes: dict[int, Config]) -> SuperNodes:
    grid = SuperNodes({node: Context(1, node, own, RecordDict(), config) for node, own in nodes.items()})
    server(grid, Context(1, 0, {}, RecordDict(), config))
    return grid


SIMULATED: dict[int, Config] = {7 + i: {"partition-id": i, "num-partitions": 3} for i in range(3)}
"""Nodes as Flower's simulation makes them; their numbers are arbitrary."""


@pytest.mark.parametrize(("mode", "downlink"), [("on", "delta"), ("on", "weights"), ("malicious-server", "scalars")])
def test_a_run_of_the_app_can_be_repeated_in_one_process(
    config: Config, tmp_path: Path, mode: str, downlink: str
) -> None:
    config["settings"] = f"secure.mode={mode} federation.weighting=uniform rounds=3 run.downlink={downlink}"
    (tmp_path / "policy.toml").write_text("without_privacy = true")
    grid = play(config, {node: own | {"policy": str(tmp_path / "policy.toml")} for node, own in SIMULATED.items()})
    played = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert played["weights_sha256"] == repeat(tmp_path / "run", tmp_path / "repeated")["weights_sha256"]
    expected = {"who", "introduce", "begin", "openings", "hello", "turn", "masked_request", "over"}
    assert set(grid.actions) == {f"train.{action}" for action in expected | ({"agree"} if mode != "on" else set())}
    # A client that lost its session between messages would be asked again for its keys.
    assert grid.actions.count("train.hello") == 3
    # No node remembers a finished run.
    states = [context_from_proto(context).state["baffle"] for context in grid.contexts.values()]
    assert all(isinstance(state, ConfigRecord) and state["state"] == b"" for state in states)


def test_nodes_with_their_own_keys_keep_marks_beside_them_and_no_secret_elsewhere(
    config: Config, keys: Path, tmp_path: Path
) -> None:
    nodes: dict[int, Config] = {
        i: {"keys": str(keys / f"client-{i}"), "state": str(tmp_path / f"state-{i}")} for i in range(3)
    }
    del config["state"]
    play(config, nodes)
    for i in range(3):
        state = tmp_path / f"state-{i}"
        files = {path.relative_to(state).name for path in state.rglob("*") if path.is_file()}
        assert files == {"replica"}
        assert MarksFile(keys / f"client-{i}" / "marks").lines()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What nodes log."""
    told: list[str] = []
    monkeypatch.setattr(app, "tell", told.append)
    return told


class Node:
    """A node that takes part in a run, message by message."""

    def __init__(self, config: Config, own: Config | None = None) -> None:
        self.config, self.own, self.state = config, {"partition-id": 0} if own is None else own, b""

    def answer(self, message: core.Message, kind: type[Any]) -> Any:
        reply, self.state = answer(Delivery(encode(message), self.state, self.own, self.config))
        return decode(reply, kind)


@pytest.fixture
def by_hand(keys: Path, tiny: Callable[..., Plan]) -> ServerByHand:
    return ServerByHand([ClientKeys.load(keys / f"client-{i}") for i in range(3)], tiny("secure.mode=on"))


@pytest.mark.parametrize("component", ["serverapp", "clientapp"])
def test_flower_finds_the_components_that_the_example_names(component: str) -> None:
    """It looks for them in the text of the module, without importing it."""
    example = Path(__file__).parents[2] / "examples" / "flower-app"
    components = tomllib.loads((example / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["components"]
    assert validate(components[component], project_dir=example) == (True, None)


def test_the_partition_number_says_which_client_a_node_is(config: Config, by_hand: ServerByHand) -> None:
    node = Node(config, {"partition-id": 2})
    statement = by_hand.statement(2, node.answer(by_hand.introduce(), Introduction))
    require_signed_commitments(statement, by_hand.roster.server_key, by_hand.roster.directory())
    assert node.answer(Who(bytes(32)), Me).client == 2


@pytest.mark.parametrize(
    ("node", "changes", "reason"),
    [
        ({"keys": "/keys"}, {}, "keys without state"),
        ({}, {}, "expected keys and state; or a partition-id"),
        ({"partition-id": 3}, {}, "client-3"),
        ({"partition-id": 0}, {"keys": ""}, "expected keys and state"),
        ({"partition-id": 0}, {"keys": "here"}, "keys: expected an absolute path, got 'here'"),
        ({"partition-id": 0, "part": 1}, {}, "part: expected bool, got 1"),
        ({"partition-id": 2, "policy": "POLICY"}, {}, 'mode asks for at least "malicious-server"'),
    ],
)
def test_a_node_says_in_its_own_log_what_is_wrong_with_its_configuration_or_against_its_policy(
    config: Config, by_hand: ServerByHand, node: Config, changes: Config, reason: str, told: list[str], tmp_path: Path
) -> None:
    (tmp_path / "policy.toml").write_text('mode = "malicious-server"')
    node = {name: str(tmp_path / "policy.toml") if value == "POLICY" else value for name, value in node.items()}
    assert Node({**config, **changes}, node).answer(by_hand.introduce(), Abstention) == Abstention(0)
    assert len(told) == 1
    assert reason in told[0]


def test_no_error_of_a_node_reaches_flower(
    config: Config, by_hand: ServerByHand, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower sends the text of an error to the server."""

    def fails(_delivery: Delivery) -> NoReturn:
        raise ValueError("/home/alice/notes")

    monkeypatch.setattr(app, "_identify", fails)
    assert Node(config).answer(by_hand.introduce(), Abstention) == Abstention(0)
    assert told == ["cannot answer: ValueError('/home/alice/notes')"]


def test_a_node_whose_memory_is_damaged_or_gone_is_unready(config: Config, by_hand: ServerByHand) -> None:
    node = Node(config)
    statement = by_hand.statement(0, node.answer(by_hand.introduce(), Introduction))
    ready = node.answer(Begin(encode(statement), ()), Ready)
    node.answer(by_hand.openings(0, statement, ready.nonce), Salted)
    whole = node.state
    assert node.answer(Hello(0), Advertisement)
    for node.state in (whole[:-9], b""):
        assert node.answer(Hello(0), Unready)


def test_two_processes_of_one_node_see_each_others_marks(config: Config, by_hand: ServerByHand) -> None:
    """A SuperNode may start two processes from the same memory. What the first has marked, the second refuses."""
    node = Node(config)
    statement = by_hand.statement(0, node.answer(by_hand.introduce(), Introduction))
    before, begin, own = node.state, Begin(encode(statement), ()), statement.commitments[0]
    node.answer(begin, Ready)
    other = by_hand.statement(0, Introduction(0, own.commitment, own.signature), tiers=(3, 3, 3))
    node.state = before
    assert node.answer(Begin(encode(other), ()), Abstention)
    node.state = before
    assert node.answer(begin, Ready)


def test_a_run_does_not_choose_which_folder_a_node_with_its_own_key_reads(
    config: Config, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever submits a run writes its configuration: `data` could name any folder of the node's owner."""
    chosen = list[tuple[object, object]]()
    monkeypatch.setattr(app, "with_plan", lambda _number, data, part: chosen.append((data, part)))
    own: Config = {"keys": str(keys / "client-0"), "state": str(tmp_path / "state")}
    for node in (own, {**own, "data": "/mine", "part": True}, {"partition-id": 0}):
        delivery = Delivery(b"", b"", node, {**config, "data": "/secret", "part": True})
        app._member(delivery, *app._identify(delivery))
    assert chosen == [(None, False), (Path("/mine"), True), (Path("/secret"), True)]


def test_a_node_alone_says_that_functions_of_its_plan_are_called(
    config: Config, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"keys": str(keys / "client-0"), "state": str(tmp_path / "s"), "plan": "digits"}
    own["settings"] = "update.optimizer=mine:lion"
    for node, run, called in ((own, {"own-code": True}, set()), (own | {"own-code": True}, {}, {"mine:lion"})):
        monkeypatch.setattr("baffle.plan.arithmetic._vouched", set())
        delivery = Delivery(b"", b"", node, {**config, **run})
        app._member(delivery, *app._identify(delivery))
        assert arithmetic._vouched == called


def test_whatever_becomes_of_a_nodes_memory_no_vector_is_sent_under_two_noises(
    config: Config, keys: Path, tmp_path: Path
) -> None:
    """A server can start another Flower run, in which a node remembers nothing, or have a message delivered again to
    what the node remembered before. What was paid, and which slots were used, is beside the key."""
    settings = "rounds=3 secure.mode=on federation.weighting=uniform privacy.noise=3 privacy.clip=1.0"
    others: dict[int, Config] = {7 + i: {"partition-id": i} for i in range(3)}
    told = dict[tuple[int, bytes], set[bytes]]()
    real, states = app.answer, dict[int, list[bytes]]()

    def again(delivery: Delivery) -> tuple[bytes, bytes]:
        """Every request to compute is delivered to all that the node has remembered so far, and to nothing."""
        number = int(str(delivery.node["partition-id"]))
        reply, state = real(delivery)
        if core.tag_of(delivery.content) == "masked-request":
            replies = told.setdefault((number, delivery.content), set())
            for memory in (*states.get(number, []), delivery.state, state, b""):
                repeated, _ = real(delivery._replace(state=memory))
                replies |= {repeated} if core.tag_of(repeated) == "contribution" else set()
            replies.add(reply)
        states.setdefault(number, []).append(delivery.state)
        return reply, state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "answer", again)
        play({**config, "settings": settings, "state": str(tmp_path / "state")}, others)
    assert len(told) == 9
    assert {len(replies) for replies in told.values()} == {1}
    spent = [MarksFile(keys / f"client-{i}" / "marks").ledger.releases() for i in range(3)]
    assert [[release.count for release in releases] for releases in spent] == [[3]] * 3


def test_messages_of_one_client_are_answered_one_at_a_time(
    config: Config, by_hand: ServerByHand, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = list[bool]()
    member = app._member

    def look(*arguments: Any) -> Member:
        folder = os.open(keys / "client-0", os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked.append(False)
        except BlockingIOError:
            locked.append(True)
        finally:
            os.close(folder)
        return member(*arguments)

    monkeypatch.setattr(app, "_member", look)
    Node(config).answer(by_hand.introduce(), Introduction)
    assert locked == [True]  # before its marks are read


def test_a_server_without_folders_and_a_message_of_another_app_are_refused(config: Config) -> None:
    for name in ("keys", "out"):
        with pytest.raises(PlanError, match="keys and out"):
            play({**config, name: ""}, SIMULATED)
    message = Message(RecordDict({"baffle": ConfigRecord({"message": 3})}), 7, "train.hello", ttl=9.0)
    with pytest.raises(MessageError, match="expected a record 'baffle'"):
        client(message, Context(1, 7, {}, RecordDict(), {}))
