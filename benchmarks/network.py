"""Costs of a networked run over loopback: the real commands, with TLS.

python benchmarks/network.py           # 3 and 10 clients on PyTorch, K = 100 on digits; 3 on ONNX Runtime with a LeNet
python benchmarks/network.py --json    # for results/network.json

Clients reach the server through a proxy that counts the encrypted bytes in both directions, without the headers of TCP.
It counts from the second round to the last but one. Seconds are those of metrics.jsonl. All processes share the cores
of one machine, so CPU time says more than seconds do. Memory is what the kernel counts for a whole process.

Transport is what carrying messages costs, in CPU time for one client and round: the threads of server and clients that
do nothing else, and signing and checking, which is measured apart and counted for every message.

"Beyond the probes" is what a round takes longer than the main threads of the clients need on two cores.
"""

import argparse
import json
import os
import re
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from edge import write_samples

from baffle.network.link.envelope import ask, read_reply, read_request, reply

COMMAND = (sys.executable, "-m", "baffle.cli.main")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SAMPLES = 600
"""Samples of each client that has its own folder of data."""

QUIET = 12.0
"""Seconds until the exchanges of a client that has just joined are over."""

EXCHANGES = 2
"""A round takes two exchanges: one for the vectors, and one to remove their masks and open the next round."""

HERE = "connected to"
"""What a client says when it is connected."""


class Proxy:
    """Forwards connections to a port of this machine and counts bytes: `up` to the server, `down` from it."""

    def __init__(self, port: int) -> None:
        self._port, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.up = self.down = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        with client:
            try:
                with socket.create_connection(("127.0.0.1", self._port)) as server:
                    self._carry(client, server)
            except OSError:
                return  # one side went away; closing both ends tells the other

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            for source in select.select([client, server], [], [])[0]:
                data = source.recv(1 << 16)
                if not data:
                    return
                if source is client:
                    self.up += len(data)
                    server.sendall(data)
                else:
                    self.down += len(data)
                    client.sendall(data)


class Reading(NamedTuple):
    """Bytes, and CPU seconds of the server and of all clients, at one moment. Threads other than the main ones carry
    messages."""

    moment: float
    up: int
    down: int
    server_main: float
    server_threads: float
    clients_main: float
    clients_threads: float


class Federation:
    """A server and its clients as processes, in a folder with keys."""

    def __init__(self, folder: Path, plan: Sequence[str], serving: Sequence[str]) -> None:
        self.folder, self._plan, self._serving = folder, plan, serving
        self._port = free_port()
        self.proxy = Proxy(self._port)
        self.clients: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Federation":
        options = ["--keys", "keys/server", "--out", "run", "--host", "127.0.0.1", "--port", str(self._port)]
        self._server = self._start("server", ["serve", *self._plan, *options, *self._serving])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (*self.clients, self._server):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.wait()
        self.proxy.close()

    def join(self, number: int, options: Sequence[str]) -> None:
        own = ["--keys", f"keys/client-{number}", "--state", f"state-{number}", *options]
        self.clients.append(self._start(f"client-{number}", ["join", f"localhost:{self.proxy.port}", *own]))

    def read(self) -> Reading:
        clients = [client.pid for client in self.clients]
        return Reading(
            time.monotonic(),
            self.proxy.up,
            self.proxy.down,
            main_thread_seconds(self._server.pid),
            cpu_seconds(self._server.pid) - main_thread_seconds(self._server.pid),
            sum(map(main_thread_seconds, clients)),
            sum(map(cpu_seconds, clients)) - sum(map(main_thread_seconds, clients)),
        )

    def wait_for(self, words: str, count: int, name: str = "client-*") -> None:
        """Wait until this many logs contain the words."""
        while sum(words in log.read_text() for log in self.folder.glob(f"{name}.log")) < count:
            self._require_running()
            time.sleep(0.1)

    def rounds(self) -> list[dict[str, Any]]:
        """The metrics of the rounds so far."""
        try:
            lines = (self.folder / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_rounds(self, count: int) -> Reading:
        while len(self.rounds()) < count:
            self._require_running()
            time.sleep(0.02)
        return self.read()

    def summary(self) -> dict[str, Any]:
        if self._server.wait():
            sys.exit((self.folder / "server.log").read_text())
        return dict(json.loads((self.folder / "run" / "summary.json").read_text()))

    def _start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [*COMMAND, *command],
                cwd=self.folder,
                env={**os.environ, **ONE_THREAD},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _require_running(self) -> None:
        for process in (self._server, *self.clients):
            if process.poll():
                sys.exit("".join(log.read_text() for log in sorted(self.folder.glob("*.log"))))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def cpu_seconds(process: int) -> float:
    """CPU time of all threads of a process."""
    return _cpu_seconds(Path(f"/proc/{process}/stat"))


def main_thread_seconds(process: int) -> float:
    return _cpu_seconds(Path(f"/proc/{process}/task/{process}/stat"))


def _cpu_seconds(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def signing_ms(size: int) -> float:
    """CPU time that both sides spend on signing and checking a request and its reply of this many bytes."""
    server, client = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    keys = [identity.public_key().public_bytes_raw() for identity in (server, client)]
    body, begun, times = bytes(size), time.process_time(), 200
    for _ in range(times):
        request = ask(server, keys[1], bytes(32), 0, "hello", body)
        answer = reply(client, keys[0], read_request(keys[0], keys[1], request.frame), body)
        read_reply(keys[1], keys[0], request, answer)
    return 1000 * (time.process_time() - begun) / times


def resident_mb(process: int, field: str) -> float:
    match = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(match[1]) / 1024 if match else 0.0


def make(folder: Path, *command: str) -> None:
    subprocess.run([*COMMAND, *command], cwd=folder, stdout=subprocess.DEVNULL, check=True)


def costs(federation: Federation, clients: int, rounds: int) -> dict[str, Any]:
    """What a round costs on average, from the second to the last but one: the last round evaluates."""
    begin, end = federation.wait_for_rounds(1), federation.wait_for_rounds(rounds - 1)
    turns = rounds - 2
    records = federation.rounds()[: rounds - 1]
    seconds = [later["seconds"] - earlier["seconds"] for earlier, later in pairwise(records)]
    spent = {
        name: 1000 * (getattr(end, name) - getattr(begin, name)) / turns
        for name in ("server_main", "server_threads", "clients_main", "clients_threads")
    }
    wire = {"up": (end.up - begin.up) / turns / clients, "down": (end.down - begin.down) / turns / clients}
    signing = EXCHANGES * signing_ms(round(max(wire.values()) / EXCHANGES))
    transport = (spent["server_threads"] + spent["clients_threads"]) / clients + signing
    return {
        "clients": clients,
        "rounds": turns,
        "contributors": min(record["contributors"] for record in records[1:]),
        "seconds": {
            "median": round(statistics.median(seconds), 3),
            "least": round(min(seconds), 3),
            "most": round(max(seconds), 3),
        },
        "beyond_probes_seconds": round(statistics.median(seconds) - spent["clients_main"] / 2000, 3),
        "cpu_ms": {
            "client": round((spent["clients_main"] + spent["clients_threads"]) / clients, 1),
            "server": round(spent["server_main"] + spent["server_threads"], 1),
        },
        "transport_ms": round(transport, 2),
        "signing_ms": round(signing, 2),
        "wire_bytes": {direction: round(size) for direction, size in wire.items()},
        "message_bytes": {
            "up": round(statistics.fmean(record["uplink_bytes"] for record in records[1:]) / clients),
            "down": round(statistics.fmean(record["downlink_bytes"] for record in records[1:]) / clients),
        },
    }


def on_torch(clients: int, k: int, rounds: int) -> dict[str, Any]:
    """Rounds on the digits, each client a process with PyTorch. While the last client is missing, it also measures what
    waiting costs."""
    plan = ["digits", "--set", f"probe.k={k}", "--set", f"rounds={rounds}", "--set", "run.evaluate_every=1000"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, "keys", "new", "keys", "--clients", str(clients))
        with Federation(folder, plan, []) as federation:
            federation.wait_for("listening", 1, "server")
            for number in range(clients - 1):
                federation.join(number, ["--part"])
            federation.wait_for(HERE, clients - 1)
            time.sleep(QUIET)
            begin = federation.read()
            time.sleep(2 * QUIET)
            end = federation.read()
            federation.join(clients - 1, ["--part"])
            per_round = costs(federation, clients, rounds)
            waited = (end.moment - begin.moment) * (clients - 1)
            waiting = {"up": round((end.up - begin.up) / waited, 1), "down": round((end.down - begin.down) / waited, 1)}
            federation.summary()
            return {"k": k, **per_round, **overhead(per_round), "waiting_bytes_per_second": waiting}


def overhead(row: dict[str, Any]) -> dict[str, Any]:
    """What TCP carries beyond the messages: bytes for each exchange, up and down together, and percent."""
    messages, wire = sum(row["message_bytes"].values()), sum(row["wire_bytes"].values())
    return {
        "bytes_beyond_messages_per_exchange": round((wire - messages) / EXCHANGES),
        "percent_beyond_messages": round(100 * (wire / messages - 1), 1),
    }


def on_onnx(clients: int, k: int, rounds: int) -> dict[str, Any]:
    """Rounds of the paper's LeNet, each client a process without PyTorch that has its own folder of
    samples."""
    settings = [f"probe.k={k}", f"rounds={rounds}", f"federation.clients={clients}", f"ring.n_max={SAMPLES}"]
    settings += ['federation.level="batch"', "run.evaluate_every=1000"]
    plan = ["paper-mnist-lenet", *(word for setting in settings for word in ("--set", setting))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(clients):
            write_samples(folder / f"data-{number}", SAMPLES, number)
        make(folder, "keys", "new", "keys", "--clients", str(clients))
        make(folder, "export", *plan, "--data", "data-0", "--out", "model")
        with Federation(folder, plan, ["--data", "data-0"]) as federation:
            federation.wait_for("listening", 1, "server")
            for number in range(clients):  # they stay after the run, so that their peak can be read
                federation.join(number, ["--data", f"data-{number}", "--model", "model", "--stay"])
            federation.wait_for(HERE, clients)
            joined = [resident_mb(client.pid, "VmRSS") for client in federation.clients]
            per_round = costs(federation, clients, rounds)
            resident = [resident_mb(client.pid, "VmRSS") for client in federation.clients]
            federation.wait_for("the run is over", clients)
            peak = [resident_mb(client.pid, "VmHWM") for client in federation.clients]
            summary = federation.summary()
            memory = {"joined": joined, "in rounds": resident, "peak": peak}
            return {
                "k": k,
                "batch": 32,
                "n_weights": summary["n_weights"],
                **per_round,
                "memory_mb": {stage: round(float(np.max(mb)), 1) for stage, mb in memory.items()},
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=[3, 10], help="Numbers of clients on PyTorch.")
    parser.add_argument("--edge", type=int, default=3, help="Clients on ONNX Runtime; 0 leaves them out.")
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=22)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    torch = [on_torch(clients, args.k, args.rounds) for clients in args.clients]
    onnx = on_onnx(args.edge, args.k, args.rounds) if args.edge else None
    if args.json:
        measured = {"cores": os.cpu_count(), "load_before": round(load, 1), "torch": torch, "onnx": onnx}
        print(json.dumps(measured, indent=2))
        return
    for row in [*torch, *([onnx] if onnx else [])]:
        for name, value in row.items():
            print(f"{name:36}{value}")
        print()


if __name__ == "__main__":
    main()
