"""BAFFLE as a Flower App: the real ServerApp and ClientApp, without Flower's processes between them."""

import fcntl
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import pytest

from baffle.aggregation.client.marks import MarksFile
from baffle.aggregation.messages import Advertisement, Hello
from baffle.core import messages as core
from baffle.core.messages import Abstention, decode, encode
from baffle.errors import MessageError, PlanError
from baffle.network.authority import make_keys
from baffle.network.joining import UNREADY, Begin, Introduction, Ready, Salted
from baffle.network.keys import ClientKeys
from baffle.network.member import Member
from baffle.plan import Plan
from baffle.repetition import repeat
from baffle.statement import Statement, require_signed_commitments
from tests.support.server_by_hand import ServerByHand

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common.serde import context_from_proto, context_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from baffle.flower import app
from baffle.flower.app import ACTIONS, answer, client, server
from baffle.flower.app_wrappers import Delivery
from baffle.flower.identify import Me, Who


class Nodes(Grid):
    """SuperNodes without a network, with real messages and contexts. Between messages each node keeps its context in
    Flower's encoding, as a SuperNode does."""

    def __init__(self, contexts: dict[int, Context]) -> None:
        self.contexts = {node: context_to_proto(context) for node, context in contexts.items()}
        self.actions: list[str] = []
        self._replies: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = name = str(uuid4())
            node = message.metadata.dst_node_id
            self.actions.append(message.metadata.message_type)
            context = context_from_proto(self.contexts[node])
            self._replies[name] = client(message, context)
            self.contexts[node] = context_to_proto(context)
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in list(message_ids) if name in self._replies]

    def _unused(self, *_arguments: Any, **_options: Any) -> Any:
        raise NotImplementedError

    set_run = create_message = send_and_receive = _unused
    run = property(_unused)


@pytest.fixture(autouse=True)
def _in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's processes know which run they belong to."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", 3, ["localhost"])
    return tmp_path / "keys"


Config = dict[str, bool | float | int | str]


@pytest.fixture
def config(keys: Path, tmp_path: Path, tiny_toml: Path) -> Config:
    return {
        "plan": str(tiny_toml),
        "settings": "secure.mode=on rounds=3",
        "keys": str(keys),
        "out": str(tmp_path / "run"),
        "part": True,
        "state": "",
    }


def play(config: Config, nodes: dict[int, Config]) -> Nodes:
    grid = Nodes({node: Context(1, node, own, RecordDict(), config) for node, own in nodes.items()})
    server(grid, Context(1, 0, {}, RecordDict(), config))
    return grid


SIMULATED: dict[int, Config] = {7 + i: {"partition-id": i, "num-partitions": 3} for i in range(3)}
"""Nodes as Flower's simulation makes them; their numbers are arbitrary."""


def weights_hash(out: object) -> str:
    sha256: str = json.loads((Path(str(out)) / "summary.json").read_text())["weights_sha256"]
    return sha256


@pytest.mark.parametrize(
    ("mode", "downlink"), [("on", "scalars"), ("on", "weights"), ("malicious-server", "scalars"), ("on", "delta")]
)
def test_a_run_of_the_app_can_be_repeated_in_one_process(
    config: Config, tmp_path: Path, mode: str, downlink: str
) -> None:
    settings = [f"secure.mode={mode}", "rounds=3", f"run.downlink={downlink}"]
    config["settings"] = " ".join(settings)
    grid = play(config, SIMULATED)
    repeat(str(config["out"]), tmp_path / "repeated")
    assert weights_hash(config["out"]) == weights_hash(tmp_path / "repeated")
    expected = {"who", "introduce", "begin", "openings", "hello", "turn", "masked_request", "over"}
    assert set(grid.actions) == {f"train.{action}" for action in expected | ({"agree"} if mode != "on" else set())}


def test_no_node_is_asked_twice_for_its_keys_and_none_remembers_a_finished_run(config: Config) -> None:
    """A client that lost its session between messages would be asked again for its keys."""
    grid = play(config, SIMULATED)
    assert grid.actions.count("train.hello") == 3
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


def delivery(content: bytes, node: Config, config: Config, state: bytes = b"") -> Delivery:
    return Delivery(content, state, node, config)


@pytest.fixture
def by_hand(keys: Path, tiny: Callable[..., Plan]) -> ServerByHand:
    return ServerByHand([ClientKeys.load(keys / f"client-{i}") for i in range(3)], tiny("secure.mode=on"))


def test_the_partition_number_says_which_client_a_node_is(config: Config, by_hand: ServerByHand) -> None:
    reply, _ = answer(delivery(encode(by_hand.introduce()), {"partition-id": 2}, config))
    introduction = decode(reply, Introduction)
    statement = by_hand.statement(2, introduction)
    require_signed_commitments(statement, by_hand.roster.server_key, by_hand.roster.directory())
    reply, _ = answer(delivery(encode(Who(bytes(32))), {"partition-id": 2}, config))
    assert decode(reply, Me).client == 2


def test_a_node_has_a_policy_of_its_own(
    config: Config, by_hand: ServerByHand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(app, "tell", told.append)
    (tmp_path / "policy.toml").write_text('mode = "malicious-server"')
    node: Config = {"partition-id": 2, "policy": str(tmp_path / "policy.toml")}
    assert answer(delivery(encode(by_hand.introduce()), node, config))[0] == encode(Abstention(0))
    assert 'mode asks for at least "malicious-server"' in told[0]


@pytest.mark.parametrize(
    ("node", "changes", "reason"),
    [
        ({"keys": "/keys"}, {}, "keys without state"),
        ({}, {}, "expected keys and state; or a partition-id"),
        ({"partition-id": 3}, {}, "client-3"),
        ({"partition-id": 0}, {"keys": ""}, "expected keys and state"),
        ({"partition-id": 0}, {"keys": "here"}, "keys: expected an absolute path, got 'here'"),
        ({"partition-id": 0, "part": 1}, {}, "part: expected bool, got 1"),
    ],
)
def test_a_node_with_a_wrong_configuration_says_what_is_wrong_in_its_own_log(
    config: Config,
    by_hand: ServerByHand,
    node: Config,
    changes: Config,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(app, "tell", told.append)
    reply, _ = answer(delivery(encode(by_hand.introduce()), node, {**config, **changes}))
    assert reply == encode(Abstention(0))
    assert len(told) == 1
    assert reason in told[0]


def test_no_error_of_a_node_reaches_flower(
    config: Config, by_hand: ServerByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower sends the text of an error to the server."""

    def fails(_delivery: Delivery) -> NoReturn:
        raise ValueError("/home/alice/notes")

    told: list[str] = []
    monkeypatch.setattr(app, "tell", told.append)
    monkeypatch.setattr(app, "_identify", fails)
    reply, _ = answer(delivery(encode(by_hand.introduce()), {"partition-id": 0}, config))
    assert reply == encode(Abstention(0))
    assert told == ["cannot answer: ValueError('/home/alice/notes')"]


def test_a_node_that_remembers_nothing_is_unready(config: Config) -> None:
    assert answer(delivery(encode(Hello(0)), {"partition-id": 0}, config))[0] == UNREADY


class Node:
    """A node that takes part in a run, message by message."""

    def __init__(self, config: Config) -> None:
        self.config, self.state = config, b""

    def answer(self, message: core.Message, kind: type[Any]) -> Any:
        reply, self.state = answer(delivery(encode(message), {"partition-id": 0}, self.config, self.state))
        return decode(reply, kind)

    def enter(self, server: ServerByHand) -> None:
        statement = server.statement(0, self.answer(server.introduce(), Introduction))
        ready = self.answer(Begin(encode(statement), ()), Ready)
        self.answer(server.openings(0, statement, ready.nonce), Salted)


def test_a_node_whose_memory_is_damaged_is_unready(config: Config, by_hand: ServerByHand) -> None:
    node = Node(config)
    node.enter(by_hand)
    whole = node.state
    assert node.answer(Hello(0), Advertisement)
    assert answer(delivery(encode(Hello(0)), {"partition-id": 0}, config, whole[:-9]))[0] == UNREADY


def test_two_processes_of_one_node_see_each_others_marks(config: Config, by_hand: ServerByHand) -> None:
    """A SuperNode may start two processes from the same memory. What the first has marked, the second refuses."""
    node = Node(config)
    statement = by_hand.statement(0, node.answer(by_hand.introduce(), Introduction))
    before, begin = node.state, Begin(encode(statement), ())
    node.answer(begin, Ready)
    node.state = before
    other = by_hand.statement(0, Introduction(0, *_own(statement)), tiers=(3, 3, 3))
    assert node.answer(Begin(encode(other), ()), Abstention)
    node.state = before
    assert node.answer(begin, Ready)


def _own(statement: Statement) -> tuple[bytes, bytes]:
    own = statement.commitments[0]
    return own.commitment, own.signature


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


@pytest.mark.parametrize("name", ["keys", "out"])
def test_a_server_without_folders_says_so(config: Config, name: str) -> None:
    with pytest.raises(PlanError, match="keys and out"):
        play({**config, name: ""}, SIMULATED)


def test_a_message_of_another_app_is_refused() -> None:
    content = RecordDict({"baffle": ConfigRecord({"message": 3})})
    message = Message(content, 7, "train.hello", ttl=9.0)
    with pytest.raises(MessageError, match="expected a record 'baffle'"):
        client(message, Context(1, 7, {}, RecordDict(), {}))


def test_actions_are_names_that_flower_accepts() -> None:
    assert all(action.isidentifier() and action != "message" for action in ACTIONS)
