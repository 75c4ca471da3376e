"""Seconds to 90 % over a network with a delay of 50 ms each way, with rounds of one step and of ten.

    python benchmarks/delay.py            # about eight minutes
    python benchmarks/delay.py --json     # ... and write results/delay.json; rows in it are kept

The real commands on one machine: `baffle serve` and ten times `baffle join`, over TLS and with secure sums. A proxy
between them holds everything back for 50 ms, in both directions. A client has a tenth of the digits' training samples.
Accuracy is that of the test set, looked at about every ten steps. Seconds are those of metrics.jsonl, from the first
round on; evaluating is part of them. All processes share the machine's cores, so ten clients compute by turns what
devices of their own would compute at once.
"""

import argparse
import json
import os
import queue
import socket
import tempfile
import threading
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from network import HERE, Federation, Proxy, make

FILE = Path(__file__).parents[1] / "results" / "delay.json"
DELAY, CLIENTS, TARGET, STEPS = 0.05, 10, 0.9, 303
WARM_UP = 3  # rounds of one step
PLAN = (
    "digits",
    "federation.batch=8",
    f"federation.warm_up={WARM_UP}",
    "run.workers=1",
)


class DelayingProxy(Proxy):
    """Forwards what it gets, 50 ms later."""

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pairs = ((client, server), (server, client))
        threads = [threading.Thread(target=self._one_way, args=pair, daemon=True) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @staticmethod
    def _one_way(source: socket.socket, target: socket.socket) -> None:
        held: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def deliver() -> None:
            while True:
                due, data = held.get()
                time.sleep(max(0.0, due - time.monotonic()))
                with suppress(OSError):
                    target.sendall(data) if data else target.shutdown(socket.SHUT_WR)
                if not data:
                    return

        sending = threading.Thread(target=deliver, daemon=True)
        sending.start()
        data = b" "
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            held.put((time.monotonic() + DELAY, data))
        sending.join()


def played(steps: int, k: int, *changes: str) -> dict[str, Any]:
    """A run up to the round in which it reaches the target, or to its end."""
    rounds = WARM_UP + (STEPS - WARM_UP) // steps
    evaluated = f"run.evaluate_every={max(1, 10 // steps)}"
    settings = [*PLAN[1:], f"federation.local_steps={steps}", f"probe.k={k}", f"rounds={rounds}", evaluated, *changes]
    plan = [PLAN[0], *(word for setting in settings for word in ("--set", setting))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, "keys", "new", "keys", "--clients", str(CLIENTS))
        with Federation(folder, plan, []) as federation:
            federation.proxy.close()
            federation.proxy = DelayingProxy(federation._port)  # before anybody joins
            federation.wait_for("listening", 1, "server")
            for number in range(CLIENTS):
                federation.join(number, ["--part"])
            federation.wait_for(HERE, CLIENTS)
            reached, count = None, 0
            while reached is None and count < rounds:
                federation.wait_for_rounds(count + 1)
                records = federation.rounds()
                count = len(records)
                reached = next((record for record in records if record.get("test_accuracy", 0) >= TARGET), None)
    last = reached or records[-1]
    return {
        "k": k,
        "steps_a_round": steps,
        "rounds": last["round"] + 1,
        "steps": WARM_UP + (last["round"] + 1 - WARM_UP) * steps,
        "seconds": last["seconds"],
        "accuracy": last["test_accuracy"],
        "reached": reached is not None,
        "contributors": min(record["contributors"] for record in records),
        "up_bytes": round(sum(record["uplink_bytes"] for record in records[: last["round"] + 1]) / CLIENTS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="*", default=[1, 10])
    parser.add_argument("--k", type=int, nargs="*", default=[10, 20])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="write results/delay.json")
    arguments = parser.parse_args()
    rows = json.loads(FILE.read_text())["rows"] if arguments.json and FILE.exists() else []
    for k, seed, steps in product(arguments.k, range(arguments.seeds), arguments.steps):
        about = {"k": k, "seed": seed, "steps_a_round": steps}
        if any(about.items() <= row.items() for row in rows):
            continue
        load = round(os.getloadavg()[0], 1)
        rows.append(about | played(steps, k, f"seed={seed}") | {"load_before": load})
        print(rows[-1], flush=True)
        if arguments.json:
            measured = {"delay": DELAY, "target": TARGET, "clients": CLIENTS, "cores": os.cpu_count()}
            FILE.write_text(json.dumps(measured | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
