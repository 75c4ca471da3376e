"""A run on a SuperLink, on the server's side: one whose ServerApp is this process, or one that `flwr run` started.

A grid is Flower's public interface; taking a run's place by oneself is not, so the version is checked.
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from importlib.metadata import version
from io import BytesIO
from threading import Event, Thread
from types import TracebackType
from zipfile import ZipFile

import httpx
from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.serverapp import Grid
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.interceptors import (
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from baffle.errors import AwayError, TransportError
from baffle.flower.connection import FLOWER

_KEY_KNOWN = 23  # Flower's code
_BEAT = 10.0  # seconds; SuperLink ends a run whose ServerApp was silent for 60

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
            raise superlink_error(self._address, fault) from fault

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


class AppRun:
    """A run whose ServerApp Flower has started: it begins and ends without us."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def nodes(self) -> Iterable[int]:
        """The clients that are there."""
        try:
            return self.grid.get_node_ids()
        except httpx.HTTPError as fault:
            raise superlink_error("SuperLink", fault) from fault


def superlink_error(address: str, fault: httpx.HTTPError) -> TransportError:
    if isinstance(fault, httpx.HTTPStatusError) and fault.response.status_code < 500:
        return TransportError(f"{address} does not know this run any more: begin another ({fault.response.text})")
    return AwayError(f"{address} cannot be reached ({fault})")


def _no_app() -> bytes:
    bundle = BytesIO()
    with ZipFile(bundle, "w") as files:
        files.writestr("pyproject.toml", _APP)
    return bundle.getvalue()


def _says(component: str) -> RuntimeVersionHttpInterceptor:
    return RuntimeVersionHttpInterceptor(component_name=component)
