"""Runs Flower's SuperLink as our child process: configured safely, and ended when we end."""

import errno
import os
import socket
import subprocess
import sys
import time
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from ssl import create_default_context
from types import TracebackType

from baffle.errors import TransportError
from baffle.files import make_folder

STARTUP = 60.0
"""Seconds that SuperLink may take until it answers."""

PORT_FREE = 10.0
"""Seconds to wait for a port that is in use: the port of a server that was killed is free in a moment."""

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Environment in which SuperLink contacts nobody but its clients."""


class SuperLink:
    """A SuperLink at `host`:`port`. `certificates` are the CA's certificate, SuperLink's own and its key; without them
    nothing is encrypted and every node is let in. The secret keeps strangers out: any process that knows it may be the
    ServerApp, and without a secret anybody who reaches the port could be."""

    def __init__(
        self, host: str, port: int, folder: Path, secret: Path, certificates: tuple[Path, Path, Path] | None
    ) -> None:
        self.host = host
        self.port = port
        self._folder = folder
        self._secret = secret
        self._certificates = certificates
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """The address at which this machine reaches it."""
        return f"{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{self.port}"

    def __enter__(self) -> "SuperLink":
        make_folder(self._folder)
        log = self._folder / "superlink.log"
        self._wait_for_port()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "baffle.flower.die_with_parent", *_command(), *self._options()],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.PIPE,  # the system closes it when this process ends, and then SuperLink ends
                env={**os.environ, **QUIET, "FLWR_HOME": str(self._folder.resolve())},
                start_new_session=True,  # so that Ctrl-C reaches only us; we stop SuperLink when we are done
            )
        began = time.monotonic()
        while not answers(self.address, self._certificates[0] if self._certificates else None):
            if self._process.poll() is not None or time.monotonic() - began > STARTUP:
                self._stop()
                lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
                raise TransportError(
                    f"flower-superlink did not start at {self.host}:{self.port}; the last line of {log} is: "
                    f"{lines[-1].strip() if lines else 'none'}"
                )
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _options(self) -> list[str]:
        options = ["--host", self.host, "--port", str(self.port), "--isolation", "process"]
        options += ["--superexec-auth-secret-file", str(self._secret), "--disable-runtime-dependency-installation"]
        if self._certificates is None:
            return [*options, "--insecure"]
        ca, certificate, key = map(str, self._certificates)
        options += ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key]
        return [*options, "--enable-supernode-auth"]

    def _wait_for_port(self) -> None:
        """Wait until the port is free: another process there would answer in SuperLink's place."""
        give_up = time.monotonic() + PORT_FREE
        while True:
            try:
                with socket.create_server((self.host, self.port), family=_family(self.host)):
                    return
            except OSError as fault:
                if fault.errno != errno.EADDRINUSE or time.monotonic() > give_up:
                    raise TransportError(
                        f"cannot listen at {self.host}:{self.port}: {fault.strerror or fault}; "
                        "give another --host or --port, or stop the process that listens there"
                    ) from None
            time.sleep(0.1)

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            pass  # it ends when its standard input is closed
        finally:
            if self._process.stdin:
                self._process.stdin.close()
            self._process.wait()
            self._process = None


def answers(address: str, ca: Path | None) -> bool:
    """Whether a SuperLink of ours answers at this address; over TLS if a CA's certificate is given."""
    try:
        with closing(_connection(address, ca)) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False


def _connection(address: str, ca: Path | None) -> HTTPConnection:
    host, port = address.rsplit(":", 1)
    if ca is None:
        return HTTPConnection(host, int(port), timeout=2)
    context = create_default_context(cafile=str(ca))
    context.check_hostname = False  # it is our own process, under whatever name clients reach it
    return HTTPSConnection(host, int(port), timeout=2, context=context)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _command() -> list[str]:
    """The program that is installed next to this interpreter."""
    beside = Path(sys.executable).with_name("flower-superlink")
    if not beside.exists():
        raise TransportError("flower-superlink is not installed: pip install 'baffle[flower]'")
    return [str(beside)]
