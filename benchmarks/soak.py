"""A federation of real processes in which one is killed every few rounds: does the run end, and does everybody hold the
same weights?

    python benchmarks/soak.py                            # 200 rounds, five clients
    python benchmarks/soak.py --rounds 40 --every 2      # fewer rounds, with more kills
    python benchmarks/soak.py --folder soak              # if interrupted, it continues when started again

Server and clients are processes of the command line, with TLS, node keys and secure sums. Every few rounds one of them
gets SIGKILL and is started again a moment later. Rounds and victims follow from a seed; the moment within a round
depends on the machine. If a client is away at the end, the server is started once more and sends it the last weights.
Two clients run PyTorch, the others ONNX Runtime. A sum needs three clients.

At the end the journal is verified, and every client must have the journal's weights on its disk; otherwise the exit
status is 1.
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
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from baffle.client.replica import Replica
from baffle.core.state import FLOAT
from baffle.export import export_plan
from baffle.journal.replay import verify
from baffle.journal.store import Journal
from baffle.network.authority import make_keys
from baffle.trajectory import trajectory_of

SERVER = "server"
WITH_TORCH = 2
STUCK = 300.0
"""Seconds without a round after which the federation counts as stuck."""

GOODBYE = 15.0
"""Seconds to wait for clients after the end of a run."""

MOST_RESTARTS = 3
"""How often the server is started again after the end, for clients that were away."""


class StuckError(Exception):
    """No round has ended for a long time."""


class Soak:
    """A federation in a folder: its keys, its model, its run, each client's state, and the kills so far."""

    def __init__(self, folder: Path, clients: int, rounds: int, seed: int, deadline: float) -> None:
        self.folder, self.clients, self.seed = folder, clients, seed
        settings = ["probe.k=8", f"rounds={rounds}", f"run.deadline_seconds={deadline:g}", "run.snapshot_every=20"]
        self._plan = ["digits", *(word for setting in settings for word in ("--set", setting))]
        self._rounds = rounds
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "keys").exists():
            make_keys(folder / "keys", clients, ["127.0.0.1"])
        if not (folder / "model").exists():
            export_plan("digits", folder / "model")
        self._kills = folder / "kills.json"
        self.killed = Counter[str](json.loads(self._kills.read_text()) if self._kills.exists() else {})
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    @property
    def names(self) -> list[str]:
        return [SERVER, *(f"client-{number}" for number in range(self.clients))]

    def start(self, name: str) -> None:
        keys = self.folder / "keys" / name
        if name == SERVER:
            where = ["--out", self.folder / "run", "--host", "127.0.0.1", "--port", self._port]
            command = ["serve", *self._plan, "--keys", keys, *where]
        else:
            command = ["join", f"127.0.0.1:{self._port}", "--keys", keys, "--state", self.folder / name, "--part"]
            if int(name.split("-")[1]) >= WITH_TORCH:
                command += ["--model", self.folder / "model"]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", "baffle.cli.main", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes.pop(name).wait()
        self.killed[SERVER if name == SERVER else "client"] += 1
        self._kills.write_text(json.dumps(self.killed))

    def rounds(self) -> int:
        metrics = self.folder / "run" / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def ended(self, name: str) -> bool:
        return self._processes[name].poll() is not None

    def play(self, every: int) -> None:
        """Run the federation until the server has ended, with a kill every few rounds."""
        draw = Random(f"{self.seed} {self.rounds()}")
        for name in self.names:
            self.start(name)
        at, restarts = self.rounds() + draw.randint(1, 2 * every), 0
        seen, since = self.rounds(), time.monotonic()
        while True:
            if self.ended(SERVER):
                if self._clients_ended() or restarts == MOST_RESTARTS:
                    return
                restarts += 1  # a client was away at the end: it gets the weights when the run is served again
                self.start(SERVER)
            now = self.rounds()
            if now != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > STUCK:
                raise StuckError(f"no round after round {seen} for {STUCK:.0f} s; the logs are in {self.folder}")
            if at <= now < self._rounds - 1:
                victim = draw.choice([SERVER, *draw.sample(self.names[1:], 3)])
                time.sleep(draw.uniform(0, 1))
                if not self.ended(victim):
                    self.kill(victim)
                    print(f"round {now}: killed {victim}", file=sys.stderr)
                    time.sleep(draw.uniform(0, 2))
                    self.start(victim)
                at = now + draw.randint(1, 2 * every)
            time.sleep(0.1)

    def _clients_ended(self) -> bool:
        """Whether all clients end by themselves, as they do when they know that the run is over."""
        until = time.monotonic() + GOODBYE
        while time.monotonic() < until and not all(map(self.ended, self._processes)):
            time.sleep(0.1)
        return all(map(self.ended, self._processes))

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def result(self) -> dict[str, Any]:
        run = self.folder / "run"
        result: dict[str, Any] = {"clients": self.clients, "rounds": self.rounds(), "kills": dict(self.killed)}
        if not (run / "summary.json").exists():
            return {**result, "ended": False, "equal": False, "why": (self.folder / "server.log").read_text()[-500:]}
        summary = json.loads((run / "summary.json").read_text())
        with Journal.open(run / "journal.sqlite") as journal:
            trajectory = trajectory_of(journal.plan(), journal.n_weights())
        held = {}
        for number in range(self.clients):
            for file in (self.folder / f"client-{number}").glob("*/replica"):
                weights = Replica(trajectory, file)._held.weights
                held[f"client-{number}"] = sha256(weights.astype(FLOAT).tobytes()).hexdigest()
        replayed = verify(run).weights_sha256
        return {
            **result,
            "ended": True,
            "skipped_rounds": summary["skipped_rounds"],
            "dropouts": summary["dropouts"],
            "refusals": summary["refusals"],
            "test_accuracy": summary["test_accuracy"],
            "seconds": summary["seconds"],
            "weights_sha256": replayed,
            "others": sorted(name for name in self.names[1:] if held.get(name) != replayed),
            "equal": summary["weights_sha256"] == replayed
            and set(held.values()) == {replayed}
            and len(held) == self.clients,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--every", type=int, default=4, help="rounds between two kills, on average")
    parser.add_argument("--deadline", type=float, default=8.0, help="seconds that a client has to answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to keep everything (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        soak = Soak(chosen.folder or Path(temporary), chosen.clients, chosen.rounds, chosen.seed, chosen.deadline)
        try:
            soak.play(chosen.every)
        except (KeyboardInterrupt, StuckError) as fault:
            print(f"stopped: {fault}", file=sys.stderr)
        finally:
            soak.stop()
        result = soak.result()
    print(json.dumps(result) if chosen.json else "\n".join(f"{key:15} {value}" for key, value in result.items()))
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
