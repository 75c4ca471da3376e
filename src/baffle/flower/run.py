"""A run on a SuperLink, as its ServerApp sees it: a run that we start ourselves, or one that `flwr run` started.

The grid of a run is part of Flower's public interface. Starting a run and being its ServerApp is not, so we check
Flower's version.
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

_KEY_KNOWN = 23  # Flower's code for a key that is already registered
_HEARTBEAT = 10.0  # seconds; SuperLink ends a run whose ServerApp has been silent for 60

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
"""SuperLink wants an app with every run. Nobody loads this one: our clients need none, and we are the ServerApp."""


class FlowerRun:
    """A run whose ServerApp is this process. SuperLink must have been started with `--isolation process` and a secret:
    any process that knows the secret may be the ServerApp. `keys` are the clients' public keys as PEM, for a SuperLink
    that asks for them. `app` is a bundle with a ClientApp, which stock SuperNodes load."""

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
        self._address = address
        self._roots = roots
        try:
            self._register(keys)
            self.grid = self._acquire(self._submit(app or _no_app()), secret)
        except httpx.HTTPStatusError as fault:
            raise TransportError(f"{address} refuses to start a run: {fault.response.text}") from fault
        except httpx.HTTPError as fault:
            raise AwayError(f"{address} cannot be reached ({fault})") from fault
        self._closed = Event()
        self._heartbeats = Thread(target=self._keep_alive, name="run's heartbeat", daemon=True)
        self._heartbeats.start()

    def nodes(self) -> Mapping[int, bytes]:
        """The nodes that are online: number → public key as PEM."""
        try:
            return {node.node_id: node.public_key for node in self.grid.get_nodes() if node.status == "online"}
        except httpx.HTTPError as fault:
            raise superlink_error(self._address, fault) from fault

    def close(self) -> None:
        """End the run."""
        self._closed.set()
        self._heartbeats.join()
        try:
            self.grid._runtime_client.PushTaskOutput(PushTaskOutputRequest(sub_status="completed"))
        except httpx.HTTPError:
            pass  # SuperLink ends the run when the heartbeats stop
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

    def _acquire(self, run: int, secret: bytes) -> HttpGrid:
        """Become the ServerApp of the run; returns its grid. SuperLink hands out the run that has waited longest. If
        that is another one, we end it: nobody else would take it."""
        auth = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=["/flwr.proto.Runtime/AcquireTask"])
        with RuntimeHttpClient.from_server_address(
            self._address, self._roots is None, self._roots, [_component("SuperExec"), auth]
        ) as runtime:
            while True:
                acquired = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
                if not acquired.token:
                    raise TransportError(
                        f"{self._address} gave the run to another process: stop the flower-superexec that runs there"
                    )
                grid = HttpGrid(self._address, self._roots is None, self._roots, token=acquired.token)
                # Flower's own retries never end, and they send this process SIGINT when a token is refused.
                grid._retry_invoker = None  # type: ignore[assignment]
                if acquired.task.run_id == run:
                    break
                grid._runtime_client.PushTaskOutput(PushTaskOutputRequest(sub_status="failed", details="not ours"))
                grid.close()
        task = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id = task.task_id
        TaskIdentity.run_id = task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        grid.set_run(run_from_proto(task.run))
        return grid

    def _control(self) -> ControlHttpClient:
        return ControlHttpClient.from_server_address(
            self._address, self._roots is None, self._roots, [_component("flwr CLI")]
        )

    def _keep_alive(self) -> None:
        while not self._closed.wait(_HEARTBEAT):
            try:
                self.grid._runtime_client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            except httpx.HTTPError:
                continue  # the next call on the grid reports it


class AppRun:
    """A run whose ServerApp Flower started: Flower begins and ends it."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def nodes(self) -> Iterable[int]:
        """The nodes that are online."""
        try:
            return self.grid.get_node_ids()
        except httpx.HTTPError as fault:
            raise superlink_error("SuperLink", fault) from fault


def superlink_error(address: str, fault: httpx.HTTPError) -> TransportError:
    """Our error for a call that failed: SuperLink does not know the run, or it is away."""
    if isinstance(fault, httpx.HTTPStatusError) and fault.response.status_code < 500:
        return TransportError(f"{address} no longer knows this run: start another ({fault.response.text})")
    return AwayError(f"{address} cannot be reached ({fault})")


def _no_app() -> bytes:
    """A bundle that holds no code."""
    bundle = BytesIO()
    with ZipFile(bundle, "w") as files:
        files.writestr("pyproject.toml", _APP)
    return bundle.getvalue()


def _component(component: str) -> RuntimeVersionHttpInterceptor:
    return RuntimeVersionHttpInterceptor(component_name=component)
