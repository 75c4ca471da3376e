"""A federation of real processes under fire: does the run end, and does everybody hold the same weights?

    python benchmarks/chaos.py                     # 200 rounds, six clients: about ten minutes
    python benchmarks/chaos.py --rounds 40         # fewer rounds, and fewer blows
    python benchmarks/chaos.py --folder chaos      # keeps everything; if interrupted, it goes on when started again

Server and clients are processes of the command line, over the link, with TLS and secure sums. While rounds are played,
one blow follows another:

    kill     a client or the server gets SIGKILL and is started again a moment later
    stop     a client gets SIGSTOP, and SIGCONT some seconds later
    full     a client or the server cannot write a byte for some seconds (its limit on file sizes is 0)
    double   a second process joins with a client's keys; it must end, because they are in use

Blows follow from a seed; the moment within a round depends on the machine. At most two clients are disturbed at a time,
so that a sum of three is left. A round is under fire if somebody was down, stopped, full or doubled meanwhile.
Two clients run PyTorch, the others ONNX Runtime.

At the end the journal is verified, and every client must have the journal's weights on its disk; otherwise the exit
status is 1.
"""

import argparse
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from baffle.client.replica import read_saved
from baffle.core.state import unpack
from baffle.export import export_plan
from baffle.journal.audit import verify
from baffle.journal.store import Journal
from baffle.network.keys.authority import make_keys
from baffle.trajectory import trajectory_of

SERVER = "server"
WITH_TORCH = 2
BLOWS = ("kill",) * 12 + ("stop",) * 2 + ("full", "double")
"""How often each kind of blow is dealt, out of sixteen. A quarter of the kills hit the server."""

PAUSE = 1.0
"""Seconds into a round until a blow falls, on average. At least one round is played between two blows."""

DISTURBED = 2
"""How many clients may be disturbed at a time."""

STUCK = 300.0
"""Seconds without a round after which the federation counts as stuck."""

GOODBYE = 15.0
"""Seconds to wait for clients after the end of a run."""

MOST_RESTARTS = 3
"""How often the server is started again after the end, for clients that were away."""


class StuckError(Exception):
    """No round has ended for a long time."""


class Chaos:
    """A federation in a folder: its keys, its model, its run, each client's state, and the blows so far."""

    def __init__(self, folder: Path, clients: int, rounds: int, seed: int, k: int, deadline: float) -> None:
        self.folder, self.clients = folder, clients
        settings = [f"probe.k={k}", f"rounds={rounds}", f"run.deadline_seconds={deadline:g}", "run.snapshot_every=20"]
        self._plan = ["digits", *(word for setting in settings for word in ("--set", setting))]
        self._rounds = rounds
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "keys").exists():
            make_keys(folder / "keys", clients, ["127.0.0.1"])
        if not (folder / "model").exists():
            export_plan("digits", folder / "model")
        self._kept = folder / "blows.json"
        kept = json.loads(self._kept.read_text()) if self._kept.exists() else {"blows": {}, "fire": [], "calm": []}
        self.blows = Counter[str](kept["blows"])
        self.under_fire: list[float] = kept["fire"]
        self.calm: list[float] = kept["calm"]
        self._draw = Random(f"{seed} {self.rounds()}")
        self._healing: list[tuple[float, str, Callable[[], None]]] = []  # when, whom, and what ends its trouble
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    @property
    def names(self) -> list[str]:
        return [SERVER, *(f"client-{number}" for number in range(self.clients))]

    def start(self, name: str, *, double: bool = False) -> None:
        keys = self.folder / "keys" / name
        own = f"{name}-double" if double else name
        if name == SERVER:
            where = ["--out", self.folder / "run", "--host", "127.0.0.1", "--port", self._port]
            command = ["serve", *self._plan, "--keys", keys, *where]
        else:
            command = ["join", f"127.0.0.1:{self._port}", "--keys", keys, "--state", self.folder / own, "--part"]
            if int(name.split("-")[1]) >= WITH_TORCH:
                command += ["--model", self.folder / "model"]
        with (self.folder / f"{own}.log").open("ab") as log:
            self._processes[own] = subprocess.Popen(
                [sys.executable, "-m", "baffle.cli.main", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def rounds(self) -> int:
        metrics = self.folder / "run" / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def play(self) -> None:
        """Run the federation until the server has ended, with blow after blow until shortly before the end."""
        for name in self.names:
            self.start(name)
        restarts, next_blow, struck_at = 0, 0.0, 0
        seen, since, troubled = self.rounds(), time.monotonic(), True
        while True:
            time.sleep(0.02)
            self._heal()
            self._restart_failed()
            if self._ended(SERVER) and not self._healing:
                if self._clients_ended() or restarts == MOST_RESTARTS:
                    return
                restarts += 1  # a client was away at the end: it gets the weights when the run is served again
                self.start(SERVER)
            now, moment = self.rounds(), time.monotonic()
            troubled = troubled or bool(self._healing)
            if now > seen:
                (self.under_fire if troubled else self.calm).extend([(moment - since) / (now - seen)] * (now - seen))
                seen, since, troubled = now, moment, bool(self._healing)
                self._keep()
            if moment - since > STUCK:
                raise StuckError(f"no round after round {seen} for {STUCK:.0f} s; the logs are in {self.folder}")
            if struck_at < now < self._rounds - 5:
                next_blow = next_blow or moment + self._draw.uniform(0, 2 * PAUSE)
                if moment > next_blow and self._strike(now):
                    next_blow, struck_at = 0.0, now

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def result(self) -> dict[str, Any]:
        run = self.folder / "run"
        result: dict[str, Any] = {
            "clients": self.clients,
            "rounds": self.rounds(),
            "blows": dict(sorted(self.blows.items())),
            "rounds_under_fire": len(self.under_fire),
            "seconds_a_round": {"under fire": _spread(self.under_fire), "calm": _spread(self.calm)},
        }
        if not (run / "summary.json").exists():
            return {**result, "ended": False, "equal": False, "why": (self.folder / "server.log").read_text()[-500:]}
        summary = json.loads((run / "summary.json").read_text())
        with Journal.open(run / "journal.sqlite") as journal:
            trajectory = trajectory_of(journal.plan(), journal.n_weights())
        held = {}
        for number in range(self.clients):
            file = self.folder / f"client-{number}" / "replica"
            if file.exists():
                state = unpack(trajectory.rule, read_saved(file, trajectory).state)
                held[f"client-{number}"] = state.weights_hash().hex()
        replayed = verify(run).weights_sha256
        return {
            **result,
            "ended": True,
            "skipped_rounds": summary["skipped_rounds"],
            "dropouts": summary["dropouts"],
            "refusals": summary["refusals"],
            "test_accuracy": summary["test_accuracy"],
            "weights_sha256": replayed,
            "others": sorted(name for name in self.names[1:] if held.get(name) != replayed),
            "equal": summary["weights_sha256"] == replayed
            and set(held.values()) == {replayed}
            and len(held) == self.clients,
        }

    def _strike(self, now: int) -> bool:
        """Deal the next blow to somebody who is not in trouble already, if enough others are left."""
        disturbed = {name for _, name, _ in self._healing}
        blow = self._draw.choice(BLOWS)
        on_server = blow in ("kill", "full") and self._draw.random() < 0.25
        whole = [name for name in self.names[1:] if name not in disturbed and not self._ended(name)]
        if on_server and SERVER not in disturbed and not self._ended(SERVER):
            victim = SERVER
        elif not on_server and len(disturbed - {SERVER}) < DISTURBED and whole:
            victim = self._draw.choice(whole)
        else:
            return False
        print(f"round {now}: {blow} {victim}", file=sys.stderr)
        self.blows[f"{blow} {SERVER if victim == SERVER else 'client'}"] += 1
        process = self._processes[victim]
        match blow:
            case "kill":
                process.kill()
                process.wait()
                self._later(0.0, 2.0, victim, lambda: self.start(victim))
            case "stop":
                process.send_signal(signal.SIGSTOP)
                self._later(2.0, 12.0, victim, lambda: process.send_signal(signal.SIGCONT))
            case "full":
                _limit_files(process.pid, 0)
                self._later(2.0, 8.0, victim, lambda: _limit_files(process.pid, resource.RLIM_INFINITY))
            case _:
                self.start(victim, double=True)
                self._later(6.0, 12.0, victim, lambda: self._end_double(victim))
        return True

    def _end_double(self, name: str) -> None:
        """The second process must have ended by itself: a client's keys and marks serve one process at a time."""
        double = self._processes.pop(f"{name}-double")
        log = self.folder / f"{name}-double.log"
        if double.poll() is None or "is in use by another client" not in log.read_text():
            self.blows["double that nobody noticed"] += 1
        double.kill()
        double.wait()
        log.unlink()

    def _later(self, least: float, most: float, name: str, heal: Callable[[], None]) -> None:
        self._healing.append((time.monotonic() + self._draw.uniform(least, most), name, heal))

    def _heal(self) -> None:
        due = [trouble for trouble in self._healing if trouble[0] <= time.monotonic()]
        self._healing = [trouble for trouble in self._healing if trouble not in due]
        for _, _, heal in due:
            heal()

    def _restart_failed(self) -> None:
        """Start clients again that ended with an error, as a supervisor would."""
        disturbed = {name for _, name, _ in self._healing}
        for name in self.names[1:]:
            if name not in disturbed and self._processes[name].poll():
                self.start(name)

    def _ended(self, name: str) -> bool:
        return self._processes[name].poll() is not None

    def _clients_ended(self) -> bool:
        """Whether all clients end by themselves, as they do when they know that the run is over."""
        until = time.monotonic() + GOODBYE
        while time.monotonic() < until and not all(map(self._ended, self._processes)):
            time.sleep(0.1)
        return all(map(self._ended, self._processes))

    def _keep(self) -> None:
        kept = {"blows": self.blows, "fire": self.under_fire, "calm": self.calm}
        self._kept.write_text(json.dumps(kept))


def _limit_files(process: int, size: int) -> None:
    """Let a process write files up to this size only. Nothing if it has ended."""
    try:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    except ProcessLookupError:
        return


def _spread(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {
        "median": round(statistics.median(seconds), 2),
        "mean": round(statistics.fmean(seconds), 2),
        "most": round(max(seconds), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--k", type=int, default=400, help="directions a round: more make rounds longer")
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds that a client has to answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to keep everything (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        chaos = Chaos(args.folder or Path(temporary), args.clients, args.rounds, args.seed, args.k, args.deadline)
        try:
            chaos.play()
        except (KeyboardInterrupt, StuckError) as fault:
            print(f"stopped: {fault}", file=sys.stderr)
        finally:
            chaos.stop()
        result = chaos.result()
    print(
        json.dumps(result, indent=2) if args.json else "\n".join(f"{key:18} {value}" for key, value in result.items())
    )
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
