"""Flower's library, whose only door this is: a run whose ServerApp is this process, a transport over any ServerApp's
grid, and functions of ours as a ServerApp and a ClientApp for `flwr run`.

A grid is Flower's public interface; taking a run's place by oneself is not, so the version is checked.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from hashlib import sha256
from importlib.metadata import version
from io import BytesIO
from threading import Event, Thread
from types import TracebackType
from typing import NamedTuple
from zipfile import ZipFile

import httpx
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, pull_objects
from flwr.supercore.interceptors import (
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import http_grid
from flwr.superlink.grid.http_grid import HttpGrid

from baffle.core.messages import tag_of
from baffle.errors import AwayError, MessageError, TransportError
from baffle.flower.http import FLOWER
from baffle.flower.wire import KEY, RECORD

Settings = Mapping[str, bool | int | float | str | bytes]
"""A node's or a run's configuration, as Flower gives it."""

STATE = "state"
"""The key, in a node's memory of a run, under which a ClientApp finds what it left there."""

_KEY_KNOWN = 23  # Flower's code
_BEAT = 10.0  # seconds; SuperLink ends a run whose ServerApp was silent for 60
_SHORTEST, _LONGEST = 0.05, 0.5  # seconds between two looks for replies

_PATIENCE = ContextVar("patience", default=math.inf)
"""Until when the rest of replies that have begun is waited for."""

_APP = """
[project]
name = "baffle"
version = "0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "baffle"
[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
"""
"""SuperLink wants an app with every run. Our own clients do not load it, and the ServerApp is this process."""


class FlowerRun:
    """A run on a SuperLink that was started with `--isolation process` and a secret: whoever knows the secret may take
    the ServerApp's place. `keys` are the public keys of the clients, as PEM, for a SuperLink that asks for them. `app`
    is a bundle with a ClientApp, which stock SuperNodes load."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        roots: bytes | None = None,
        keys: Iterable[bytes] = (),
        app: bytes | None = None,
    ) -> None:
        if not version("flwr").startswith(f"{FLOWER}."):
            raise TransportError(f"expected flwr {FLOWER}, got {version('flwr')}: install flwr=={FLOWER}.*")
        self._address, self._roots = address, roots
        try:
            self._register(keys)
            self.grid = self._take(self._submit(app or _no_app()), secret)
        except httpx.HTTPStatusError as fault:
            raise TransportError(f"{address} refuses to begin a run: {fault.response.text}") from fault
        except httpx.HTTPError as fault:
            raise AwayError(f"{address} cannot be reached ({fault})") from fault
        self._closed = Event()
        self._beats = Thread(target=self._beat, name="run's heartbeat", daemon=True)
        self._beats.start()

    def nodes(self) -> Mapping[int, bytes]:
        """The clients that are there: number → public key as PEM."""
        try:
            return {node.node_id: node.public_key for node in self.grid.get_nodes() if node.status == "online"}
        except httpx.HTTPError as fault:
            raise _told(self._address, fault) from fault

    def close(self) -> None:
        """Ends the run."""
        self._closed.set()
        self._beats.join()
        try:
            self.grid._runtime_client.PushTaskOutput(PushTaskOutputRequest(sub_status="completed"))
        except httpx.HTTPError:
            pass  # SuperLink ends it by itself
        finally:
            self.grid.close()

    def __enter__(self) -> "FlowerRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _register(self, keys: Iterable[bytes]) -> None:
        with self._control() as control:
            for key in keys:
                try:
                    control.RegisterNode(RegisterNodeRequest(public_key=key))
                except httpx.HTTPStatusError as fault:
                    if fault.response.json().get("code") != _KEY_KNOWN:
                        raise

    def _submit(self, app: bytes) -> int:
        fab = Fab(hash_str=sha256(app).hexdigest(), content=app)
        with self._control() as control:
            return control.StartRun(StartRunRequest(fab=fab)).run_id

    def _take(self, run: int, secret: bytes) -> HttpGrid:
        """The grid of the run. SuperLink gives out the oldest run that waits: one that is not ours is ended, as nobody
        else would take it."""
        auth = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=["/flwr.proto.Runtime/AcquireTask"])
        with RuntimeHttpClient.from_server_address(
            self._address, self._roots is None, self._roots, [_says("SuperExec"), auth]
        ) as runtime:
            while True:
                given = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
                if not given.token:
                    raise TransportError(
                        f"{self._address} gave the run to another process: is a flower-superexec there?"
                    )
                grid = HttpGrid(self._address, self._roots is None, self._roots, token=given.token)
                # Flower's own way to try again sends this process SIGINT when a token is refused, and has no end.
                grid._retry_invoker = None  # type: ignore[assignment]
                if given.task.run_id == run:
                    break
                grid._runtime_client.PushTaskOutput(PushTaskOutputRequest(sub_status="failed", details="not ours"))
                grid.close()
        given = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        grid.set_run(run_from_proto(given.run))
        return grid

    def _control(self) -> ControlHttpClient:
        return ControlHttpClient.from_server_address(
            self._address, self._roots is None, self._roots, [_says("flwr CLI")]
        )

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT):
            try:
                self.grid._runtime_client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            except httpx.HTTPError:
                continue  # whoever uses the grid finds out


class GridTransport:
    """A transport over a grid. `nodes` says which node each client is now; `seconds` is the deadline of an exchange,
    after which SuperLink takes no reply to it either. `tell` hears of clients that failed, and why."""

    def __init__(
        self,
        grid: Grid,
        nodes: Callable[[], Mapping[int, int]],
        seconds: float,
        tell: Callable[[int, str], None] = lambda _client, _why: None,
    ) -> None:
        self._grid, self._nodes, self._seconds, self._tell = grid, nodes, seconds, tell
        # Messages past their deadline: asked for once more, so that SuperLink forgets them.
        self._stale: set[str] = set()

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        begun = time.monotonic()
        nodes = self._nodes()
        there = [client for client in requests if client in nodes]
        open_ = dict(zip(self._push([(nodes[c], requests[c]) for c in there], begun), there, strict=True))
        replies: dict[int, bytes] = {}
        while open_ and (spent := time.monotonic() - begun) < self._seconds:
            looked = time.monotonic()
            for reply in self._pull(open_.keys() | self._stale):
                asked = reply.metadata.reply_to_message_id
                self._stale.discard(asked)
                client = open_.pop(asked, None)
                if client is None:
                    continue
                if reply.has_error():
                    self._tell(client, reply.error.reason or f"error {reply.error.code}")
                elif (content := _content(reply)) is None:
                    self._tell(client, f"expected a record {RECORD!r} with {KEY!r} as bytes, got another reply")
                else:
                    replies[client] = content
            if open_:
                time.sleep(min(_LONGEST, max(_SHORTEST, spent / 10, time.monotonic() - looked)))
        self._stale |= open_.keys()
        return {client: replies[client] for client in requests if client in replies}

    def _push(self, contents: list[tuple[int, bytes]], begun: float) -> list[str]:
        """Sends each content to its node; gives the messages' names. Waits for a SuperLink that is away."""
        while contents:
            left = self._seconds - (time.monotonic() - begun)
            messages = [
                Message(_record(content), node, f"train.{action(tag_of(content))}", ttl=max(left, _LONGEST))
                for node, content in contents
            ]
            try:
                return list(self._grid.push_messages(messages))
            except ObjectPushError:  # a client took its message as received before all of it was there
                return [message.metadata.message_id for message in messages]
            except httpx.HTTPError as fault:
                told = _told("SuperLink", fault)
                if not isinstance(told, AwayError) or left <= _LONGEST:
                    raise told from fault
                self._stale |= {message.metadata.message_id for message in messages}
                time.sleep(_LONGEST)
        return []

    def _pull(self, names: set[str]) -> Iterable[Message]:
        _PATIENCE.set(time.monotonic() + self._seconds / 4)
        try:
            return self._grid.pull_messages(names)
        except httpx.HTTPStatusError as fault:
            raise _told("SuperLink", fault) from fault
        except httpx.HTTPError:
            return []  # away for now; the deadline ends this


def _pull_in_time(object_ids: list[str], pull_object_fn: Callable[[str], bytes]) -> dict[str, bytes]:
    """Flower's own, but for its patience: for a reply that was announced and whose sender was then killed, or lies, it
    waits three minutes, and all other replies wait with it."""
    left = max(_LONGEST, _PATIENCE.get() - time.monotonic())
    return pull_objects(
        object_ids, pull_object_fn, max_time=left, initial_backoff=_SHORTEST, backoff_cap=min(left, _LONGEST)
    )


vars(http_grid)["pull_objects"] = _pull_in_time


def _no_app() -> bytes:
    bundle = BytesIO()
    with ZipFile(bundle, "w") as files:
        files.writestr("pyproject.toml", _APP)
    return bundle.getvalue()


def action(tag: str) -> str:
    """Each type of message is an action of its own, so that Flower's records show how far a round is."""
    named = tag.replace("-", "_")
    return named if named.isidentifier() else "message"


def _record(content: bytes) -> RecordDict:
    return RecordDict({RECORD: ConfigRecord({KEY: content})})


def _content(reply: Message) -> bytes | None:
    record = reply.content.get(RECORD)
    content = record.get(KEY) if isinstance(record, ConfigRecord) else None
    return content if isinstance(content, bytes) else None


def _says(component: str) -> RuntimeVersionHttpInterceptor:
    return RuntimeVersionHttpInterceptor(component_name=component)


def _told(address: str, fault: httpx.HTTPError) -> TransportError:
    if isinstance(fault, httpx.HTTPStatusError) and fault.response.status_code < 500:
        return TransportError(f"{address} does not know this run any more: begin another ({fault.response.text})")
    return AwayError(f"{address} cannot be reached ({fault})")


class GivenRun:
    """A run whose ServerApp Flower has started: it begins and ends without us."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def nodes(self) -> Iterable[int]:
        """The clients that are there."""
        try:
            return self.grid.get_node_ids()
        except httpx.HTTPError as fault:
            raise _told("SuperLink", fault) from fault


class FlowerNodes:
    """The nodes of a run, and messages to them."""

    def __init__(self, run: FlowerRun | GivenRun, seconds: float, tell: Callable[[int, str], None]) -> None:
        self._run, self._here = run, dict[int, int]()
        self._transport = GridTransport(run.grid, lambda: self._here, seconds, tell)

    def present(self) -> set[int]:
        self._here = {node: node for node in self._run.nodes()}
        return set(self._here)

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        return self._transport.exchange(requests)


def server_app(play: Callable[[GivenRun, Settings], None]) -> ServerApp:
    """A ServerApp that plays a run with the configuration of `flwr run`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        play(GivenRun(grid), context.run_config)

    return app


class Delivery(NamedTuple):
    """A message as it reaches a ClientApp, what the ClientApp left in the node's memory last time, and the
    configurations of its node and of the run."""

    content: bytes
    state: bytes
    node: Settings
    run: Settings


def client_app(actions: Iterable[str], answer: Callable[[Delivery], tuple[bytes, bytes]]) -> ClientApp:
    """A ClientApp from a function that gives a reply and what to leave in the node's memory."""
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        content = _content(message)
        if content is None:
            raise MessageError(f"expected a record {RECORD!r} with {KEY!r} as bytes, got another message")
        left = context.state.get(RECORD)
        state = left.get(STATE) if isinstance(left, ConfigRecord) else None
        delivery = Delivery(
            content, state if isinstance(state, bytes) else b"", context.node_config, context.run_config
        )
        reply, state = answer(delivery)
        context.state[RECORD] = ConfigRecord({STATE: state})
        return Message(_record(reply), reply_to=message)

    for one in actions:
        app.train(one)(handle)
    return app
