"""BAFFLE as a Flower App: the real ServerApp and ClientApp, without Flower's processes between them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import pytest

from baffle.aggregation.messages import Hello
from baffle.core.messages import Abstention, decode, encode
from baffle.errors import MessageError, PlanError
from baffle.network.authority import make_keys
from baffle.network.joining import UNREADY, Begin, Introduce, Introduction
from baffle.plan import Plan
from baffle.simulation import simulate

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
def test_a_run_of_the_app_ends_with_the_weights_of_a_simulation(
    config: Config, tmp_path: Path, tiny: Callable[..., Plan], mode: str, downlink: str
) -> None:
    settings = [f"secure.mode={mode}", "rounds=3", f"run.downlink={downlink}"]
    config["settings"] = " ".join(settings)
    grid = play(config, SIMULATED)
    simulate(tiny(*settings), tmp_path / "simulated")
    assert weights_hash(config["out"]) == weights_hash(tmp_path / "simulated")
    expected = {"who", "introduce", "begin", "hello", "turn", "masked_request", "over"}
    assert set(grid.actions) == {f"train.{action}" for action in expected | ({"agree"} if mode != "on" else set())}


def test_no_node_is_asked_twice_for_its_keys_and_none_remembers_a_finished_run(config: Config) -> None:
    """A client that lost its session between messages would be asked again for its keys."""
    grid = play(config, SIMULATED)
    assert grid.actions.count("train.hello") == 3
    states = [context_from_proto(context).state["baffle"] for context in grid.contexts.values()]
    assert all(isinstance(state, ConfigRecord) and state["state"] == b"" for state in states)


def test_nodes_with_their_own_keys_keep_marks_on_disk_and_no_secret(config: Config, keys: Path, tmp_path: Path) -> None:
    nodes: dict[int, Config] = {
        i: {"keys": str(keys / f"client-{i}"), "state": str(tmp_path / f"state-{i}")} for i in range(3)
    }
    del config["state"]
    play(config, nodes)
    for i in range(3):
        state = tmp_path / f"state-{i}"
        files = {path.relative_to(state).name for path in state.rglob("*") if path.is_file()}
        assert files == {"lock", "marks.jsonl", "replica"}


def delivery(content: bytes, node: Config, config: Config, state: bytes = b"") -> Delivery:
    return Delivery(content, state, node, config)


def introduce(tiny: Callable[..., Plan]) -> bytes:
    return encode(Introduce(bytes(32), tiny("secure.mode=on").to_toml()))


def test_the_partition_number_says_which_client_a_node_is(config: Config, tiny: Callable[..., Plan]) -> None:
    reply, state = answer(delivery(introduce(tiny), {"partition-id": 2}, config))
    assert decode(reply, Introduction).samples
    assert state == b""
    reply, _ = answer(delivery(encode(Who(bytes(32))), {"partition-id": 2}, config))
    assert decode(reply, Me).client == 2


def test_a_node_has_a_policy_of_its_own(
    config: Config, tiny: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(app, "tell", told.append)
    (tmp_path / "policy.toml").write_text('mode = "malicious-server"')
    node: Config = {"partition-id": 2, "policy": str(tmp_path / "policy.toml")}
    assert answer(delivery(introduce(tiny), node, config))[0] == encode(Abstention(0))
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
    tiny: Callable[..., Plan],
    node: Config,
    changes: Config,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(app, "tell", told.append)
    reply, _ = answer(delivery(introduce(tiny), node, {**config, **changes}))
    assert reply == encode(Abstention(0))
    assert len(told) == 1
    assert reason in told[0]


def test_no_error_of_a_node_reaches_flower(
    config: Config, tiny: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower sends the text of an error to the server."""

    def fails(_delivery: Delivery) -> NoReturn:
        raise ValueError("/home/alice/notes")

    told: list[str] = []
    monkeypatch.setattr(app, "tell", told.append)
    monkeypatch.setattr(app, "_identify", fails)
    reply, _ = answer(delivery(introduce(tiny), {"partition-id": 0}, config))
    assert reply == encode(Abstention(0))
    assert told == ["cannot answer: ValueError('/home/alice/notes')"]


def test_a_node_that_remembers_nothing_is_unready(config: Config) -> None:
    assert answer(delivery(encode(Hello(0)), {"partition-id": 0}, config)) == (UNREADY, b"")


def test_a_node_whose_memory_is_damaged_is_unready(config: Config, tiny: Callable[..., Plan]) -> None:
    node: Config = {"partition-id": 0}
    begin = Begin(bytes(32), tiny("secure.mode=on", "ring.n_max=999").to_toml(), (4, 4, 4))
    _, state = answer(delivery(encode(begin), node, config))
    assert answer(delivery(encode(Hello(0)), node, config, state))[0] != UNREADY
    assert answer(delivery(encode(Hello(0)), node, config, state[:-9])) == (UNREADY, b"")


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
