"""A server with a thousand clients over the link: how long rounds take, and what they cost the server.

python benchmarks/load.py                                  # 1,000 clients in two processes, all scenarios
python benchmarks/load.py --clients 100 --only break       # one scenario
python benchmarks/load.py --json                           # for results/load.json

One process runs `serve` over a `Link` with TLS. A few others hold the clients (benchmarks/swarm.py), each with its own
connection, keys and secure sums. The model is tiny, so that little time goes to probes. All share the cores of one
machine: seconds are mostly those of the clients' cryptography, so the server's CPU time is reported as well:

    transport     the link's thread, and signing requests in the main thread
    secure sum    what `SecureSum.collect` spends besides
    the rest      of the main thread: journal, weights, metrics

When clients join they get the key lists of their neighbours, which change in every round; until everybody knows
everybody's list, rounds are slower. They are played first, as a warm-up, and reported apart.

    none       nobody drops out
    break      in each round 30 % of the clients break their line without goodbye, and come back three seconds later
    silent     in each round 30 % do not answer for their vectors; the deadline is as long as two rounds
    stall      5 % stop reading their connections at the same time; the deadline is the same
    cut        all lines break at once
    restart    the server is killed and started again

At the end all clients must hold the server's weights; otherwise the exit status is 1.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from network import resident_mb

from baffle.files import replace
from baffle.network.keys.authority import make_keys

HERE = Path(__file__).resolve().parent
SCENARIOS = ("none", "break", "silent", "stall", "cut", "restart")
DROPOUT = 0.3
STALLED = 0.05
LOOK = 0.1
STUCK = 900.0
"""Seconds without news after which the benchmark gives up."""

Row = dict[str, Any]


class Clients:
    """Processes that hold the clients."""

    def __init__(self, keys: Path, clients: int, processes: int, port: int) -> None:
        bounds = [clients * number // processes for number in range(processes + 1)]
        self.sizes = [stop - first for first, stop in pairwise(bounds)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, HERE / "swarm.py", keys, str(first), str(stop), f"localhost:{port}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for first, stop in pairwise(bounds)
        ]

    def tell(self, *commands: Mapping[str, Any]) -> Row:
        """Give each process its command, or all the same one, and return their reports, summed up."""
        for number, process in enumerate(self._processes):
            assert process.stdin
            process.stdin.write(json.dumps(commands[number % len(commands)]) + "\n")
            process.stdin.flush()
        reports = [json.loads(process.stdout.readline() or "{}") for process in self._processes if process.stdout]
        if not all(reports):
            sys.exit("a process with clients has ended")
        if failures := [failure for report in reports for failure in report["failures"]]:
            sys.exit(f"clients failed: {'; '.join(failures)}")
        return {
            **{name: sum(report["spent"][name] for report in reports) for name in reports[0]["spent"]},
            **{name: sum(report["cpu"][name] for report in reports) for name in reports[0]["cpu"]},
            "probes": sum(report["probe_seconds"] for report in reports),
            "connected": sum(report["connected"] for report in reports),
            "last_weights": sum((Counter(report["last_weights"]) for report in reports), Counter[str]()),
        }

    def report(self) -> Row:
        return self.tell({"do": "report"})

    def stop(self) -> None:
        for process in self._processes:
            if process.stdin:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Federation:
    """A server and its clients in a folder."""

    def __init__(self, folder: Path, clients: int, processes: int, k: int, rounds: int, deadline: float) -> None:
        self.folder, self.size = folder, clients
        make_keys(folder / "keys", clients, ["localhost"])
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port = int(listener.getsockname()[1])
        self._deadline = deadline
        self._settings = [f"probe.k={k}", f"rounds={rounds}", f"run.deadline_seconds={deadline:g}"]
        self._settings += ['task.model={name="softmax"}', "run.evaluate_every=100000"]
        self.order(0)
        self.clients = Clients(folder / "keys", clients, processes, self._port)
        self.start()

    def __enter__(self) -> "Federation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.clients.stop()

    def start(self) -> None:
        known = len(self.log())
        with (self.folder / "server.log").open("ab") as log:
            self.server = subprocess.Popen(
                [sys.executable, HERE / "load_server.py", self.folder, str(self._port), *self._settings],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.wait(lambda: "listening" in self.log()[known:])

    def order(self, rounds: int, deadline: float | None = None) -> None:
        """Let the server play so many rounds in all. Exchanges have this deadline from now on (default: the plan's)."""
        replace(self.folder / "orders", json.dumps({"rounds": rounds, "deadline": deadline or self._deadline}).encode())

    def played(self) -> int:
        """How many rounds the server has played."""
        return max((row["round"] for row in self.rows()), default=0)

    def kill(self) -> None:
        self.server.kill()
        self.server.wait()

    def log(self) -> str:
        log = self.folder / "server.log"
        return log.read_text() if log.exists() else ""

    def rows(self) -> list[Row]:
        """What the server noted after each round."""
        try:
            lines = (self.folder / "rows.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def metrics(self) -> list[Row]:
        lines = (self.folder / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(self, until: Callable[[], bool]) -> None:
        since, played = time.monotonic(), self.played()
        while not until():
            if self.server.poll():
                sys.exit(f"the server has ended:\n{self.log()[-2000:]}")
            if self.played() != played:
                since, played = time.monotonic(), self.played()
            if time.monotonic() - since > STUCK:
                sys.exit(f"nothing has happened for {STUCK:.0f} s:\n{self.log()[-2000:]}")
            time.sleep(LOOK)

    def play(self, rounds: int, deadline: float | None = None) -> None:
        """Play until there have been so many rounds."""
        self.order(rounds, deadline)
        self.wait(lambda: self.played() >= rounds)

    def memory_mb(self, field: str) -> float:
        return round(resident_mb(self.server.pid, field), 1)

    def forget_peak(self) -> None:
        Path(f"/proc/{self.server.pid}/clear_refs").write_text("5")


def busy_seconds() -> float:
    """CPU seconds that all processes of the machine have spent."""
    user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def join(federation: Federation) -> Row:
    """Connect everybody. The last client comes later, so that the run does not begin before memory is measured."""
    size, clients = federation.size, federation.clients
    federation.wait(lambda: f"0 clients are here, {size} are needed to begin" in federation.log())
    before, began = federation.memory_mb("VmRSS"), time.monotonic()
    *others, last = clients.sizes
    clients.tell(*({"do": "connect", "clients": count} for count in (*others, last - 1)))
    federation.wait(lambda: f"{size - 1} clients are here, {size} are needed to begin" in federation.log())
    seconds, joined = time.monotonic() - began, federation.memory_mb("VmRSS")
    clients.tell(*({"do": "connect", "clients": count} for count in (*[0] * len(others), 1)))
    return {
        "seconds": round(seconds, 1),
        "memory_mb": {"listening": before, "joined": joined},
        "kb_a_connection": round(1024 * (joined - before) / (size - 1)),
    }


def warm_up(federation: Federation, rounds: int) -> Row:
    began = time.monotonic()
    federation.play(rounds)
    rows = federation.rows()
    return {
        "rounds": rounds,
        "seconds": round(rows[-1]["moment"] - began, 1),
        "first_round_seconds": round(rows[0]["moment"] - began, 1),
        "last_round_seconds": round(rows[-1]["moment"] - rows[-2]["moment"], 1),
        "server_cpu_seconds": round(rows[-1]["cpu"]["link"] + rows[-1]["cpu"]["main"], 1),
        "server_peak_mb": federation.memory_mb("VmHWM"),
        "skipped": sum(not record["contributors"] for record in federation.metrics()),
    }


def costs(federation: Federation, scenario: str, rounds: int, told: "Scenarios") -> Row:
    """Play rounds of a scenario. In the first one the scenario begins; it is reported apart."""
    first, began = federation.played() + 1, time.monotonic()
    happened = told.begin(scenario, first)
    federation.play(first, told.deadline)
    federation.forget_peak()
    before, busy = federation.clients.report(), busy_seconds() - own_cpu(federation)
    federation.play(first + rounds, told.deadline)
    after, others = federation.clients.report(), busy_seconds() - own_cpu(federation) - busy
    rows = [row for row in federation.rows() if row["round"] >= first]
    metrics = [record for record in federation.metrics() if record["round"] >= first]
    client_rounds = federation.size * len(metrics)

    def mean(name: str) -> float:
        return float(after[name] - before[name]) / client_rounds

    messages = {
        "up": sum(record["uplink_bytes"] for record in metrics),
        "down": sum(record["downlink_bytes"] + record["join_bytes"] for record in metrics),
    }
    return {
        "scenario": scenario,
        **happened,
        "first_round_seconds": round(rows[0]["moment"] - began, 1),
        "rounds": len(metrics),
        "skipped": sum(not record["contributors"] for record in metrics),
        "contributors": spread([record["contributors"] for record in metrics]),
        "seconds": spread([later["moment"] - earlier["moment"] for earlier, later in pairwise(rows)]),
        "server_cpu_seconds": server_cpu(rows),
        "server_peak_mb": federation.memory_mb("VmHWM"),
        "client_cpu_ms": {name: round(1000 * mean(name), 1) for name in ("transport", "compute", "probes")},
        "client_exchanges": round(mean("exchanges"), 2),
        "client_bytes": {
            "messages": {direction: round(size / client_rounds) for direction, size in messages.items()},
            "frames": {"up": round(mean("frames_up")), "down": round(mean("frames_down"))},
            "tcp": {"up": round(mean("up")), "down": round(mean("down"))},
        },
        "cores_busy_with_others": round(max(0.0, others) / (rows[-1]["moment"] - rows[0]["moment"]), 2),
    }


def own_cpu(federation: Federation) -> float:
    clients, server = federation.clients.report(), federation.rows()[-1]["cpu"]["process"]
    return float(clients["transport"] + clients["compute"] + server)


def spread(values: Sequence[float]) -> Row:
    return {"median": round(median(values), 2), "least": round(min(values), 2), "most": round(max(values), 2)}


def server_cpu(rows: Sequence[Row]) -> Row:
    """The server's CPU seconds a round, by what they were spent on."""

    def spent(name: str) -> float:
        return float(median(after["cpu"][name] - before["cpu"][name] for before, after in pairwise(rows)))

    link, main, collect, carry = map(spent, ("link", "main", "collect", "carry"))
    parts = {"transport": link + carry, "secure_sum": collect - carry, "rest": main - collect, "all": link + main}
    return {name: round(seconds, 2) for name, seconds in parts.items()}


class Scenarios:
    """Begins scenarios, each in the middle of a round. Whatever another one changed is as before."""

    def __init__(self, federation: Federation, round_seconds: float, least_deadline: float) -> None:
        self._federation, self._clients = federation, federation.clients
        self._round_seconds, self._least_deadline = round_seconds, least_deadline
        self.deadline: float | None = None

    def begin(self, scenario: str, number: int) -> Row:
        short = max(self._least_deadline, 2 * self._round_seconds)
        self.deadline = short if scenario in ("silent", "stall") else None
        how, share = (scenario, DROPOUT) if scenario in ("break", "silent") else ("silent", 0.0)
        self._clients.tell({"do": "behave", "how": how, "share": share})
        self._federation.order(number, self.deadline)
        time.sleep(self._round_seconds / 3)
        if scenario == "stall":
            self._clients.tell({"do": "stall", "share": STALLED, "seconds": 4 * self._round_seconds})
        elif scenario == "cut":
            self._clients.tell({"do": "cut"})
            return self._reconnected()
        elif scenario == "restart":
            return self._restart()
        return {"deadline_seconds": round(self.deadline, 1)} if self.deadline else {}

    def _restart(self) -> Row:
        began = time.monotonic()
        self._federation.kill()
        self._federation.start()
        return {"listening_again_seconds": round(time.monotonic() - began, 1), **self._reconnected()}

    def _reconnected(self) -> Row:
        """How long it takes until everybody is connected again."""
        began = time.monotonic()
        self._federation.wait(lambda: bool(self._clients.report()["connected"] == self._federation.size))
        return {"connected_again_seconds": round(time.monotonic() - began, 1)}


def finish(federation: Federation, rounds: int) -> Row:
    """Play the last round, in which nobody drops out. At its end everybody must hold its last weights."""
    federation.clients.tell({"do": "behave"})
    federation.order(rounds + 1)
    federation.wait(lambda: federation.server.poll() is not None)
    summary = json.loads((federation.folder / "run" / "summary.json").read_text())
    held = federation.clients.report()["last_weights"]
    if held != {summary["weights_sha256"]: federation.size}:
        sys.exit(f"expected that all clients hold {summary['weights_sha256']}, got {dict(held)}")
    return {"rounds": summary["rounds"], "skipped": summary["skipped_rounds"], "weights": summary["n_weights"]}


def measure(args: argparse.Namespace) -> Row:
    scenarios = args.only or SCENARIOS
    rounds = args.warm_up + len(scenarios) * (args.rounds + 1) + 1
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as name,
        Federation(Path(name), args.clients, args.processes, args.k, rounds, args.deadline) as federation,
    ):
        joined, warm = join(federation), warm_up(federation, args.warm_up)
        told, played = Scenarios(federation, warm["last_round_seconds"], args.least_deadline), []
        for scenario in scenarios:
            played.append(costs(federation, scenario, args.rounds, told))
            if not args.json:
                show(played[-1])
        ended = finish(federation, rounds)
    return {
        "cores": os.cpu_count(),
        "load_before": round(load, 1),
        "clients": args.clients,
        "processes": args.processes,
        "k": args.k,
        "join": joined,
        "warm_up": warm,
        "scenarios": played,
        "run": ended,
    }


def show(row: Row) -> None:
    for name, value in row.items():
        print(f"{name:26}{value}")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=6, help="measured rounds of each scenario")
    parser.add_argument("--warm-up", type=int, default=24, help="rounds before the first scenario, at least two")
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2, help="processes that share the clients")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds that a client has to answer")
    parser.add_argument("--least-deadline", type=float, default=1.0, help="of silent and stall, where rounds are quick")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    measured = measure(args)
    if args.json:
        print(json.dumps(measured, indent=2))
    else:
        show({name: value for name, value in measured.items() if name != "scenarios"})


if __name__ == "__main__":
    main()
