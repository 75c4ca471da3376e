"""Seconds per round with Flower's own SuperLink and SuperNodes, over TLS with node keys: what a stock node costs.

    python benchmarks/stock.py                  # 3 and 10 SuperNodes, one of them on ONNX Runtime; K = 100 on digits
    python benchmarks/stock.py --json           # for results/stock.json

A stock node starts a process for every message, so ten of them on a small machine wait for its cores. The same plan
with `baffle join` is in benchmarks/network.py. At the end all nodes must hold the last weights; otherwise the exit
status is 1.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from network import free_port, make

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Environment in which Flower's programs contact nobody but each other."""

APP = Path(__file__).parents[1] / "examples" / "flower-app"
DEADLINE = 600
"""Seconds that a node has to answer."""


@contextmanager
def started(folder: Path, name: str, command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A running program. It and all that it started are ended on leaving."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [program(command[0]), *command[1:]],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def flwr(env: dict[str, str], *arguments: str) -> str:
    done = subprocess.run([program("flwr"), *arguments], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"flwr {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout


def wait_for_superlink(env: dict[str, str]) -> None:
    """Wait until the SuperLink answers."""
    for _ in range(60):
        done = subprocess.run(
            [program("flwr"), "supernode", "list", "here"], env=env, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return
        time.sleep(1)
    sys.exit(f"flower-superlink does not answer: {done.stdout}{done.stderr}")


def play(folder: Path, clients: int, k: int, rounds: int) -> dict[str, Any]:
    settings = [f"federation.clients={clients}", f"probe.k={k}", f"rounds={rounds}", "run.evaluate_every=1000"]
    settings.append(f"run.deadline_seconds={DEADLINE}")
    plan = ["digits", *(word for setting in settings for word in ("--set", setting))]
    make(folder, "keys", "new", "keys", "--clients", str(clients), "--host", "127.0.0.1")
    make(folder, "export", *plan, "--out", "model")
    keys, link = folder / "keys", free_port()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # Flower's programs start each other by name
    env = {**os.environ, **QUIET, "PATH": path, "FLWR_HOME": str(folder / "flower"), "OMP_NUM_THREADS": "1"}
    (folder / "flower").mkdir()
    (folder / "flower" / "config.toml").write_text(
        f'[superlink.here]\naddress = "127.0.0.1:{link}"\nroot-certificates = "{keys}/server/ca.pem"\n'
    )
    ssl = [f"--ssl-ca-certfile={keys}/server/ca.pem", f"--ssl-certfile={keys}/server/server.pem"]
    ssl += [f"--ssl-keyfile={keys}/server/server.key", "--enable-supernode-auth"]
    server = ["flower-superlink", "--host", "127.0.0.1", "--port", str(link), *ssl]
    with ExitStack() as running:
        running.enter_context(started(folder, "superlink", server, env))
        wait_for_superlink(env)
        for number in range(clients):
            flwr(env, "supernode", "register", f"{keys}/server/nodes/client-{number}.pub", "here")
        for number in range(clients):
            own = f'keys="{keys}/client-{number}" state="{folder}/state-{number}" part=true'
            own += f' model="{folder}/model"' if number == clients - 1 else ""
            where = ["--superlink", f"127.0.0.1:{link}", "--host", "127.0.0.1", "--port", str(free_port())]
            known = [f"--root-certificates={keys}/client-{number}/ca.pem"]
            known.append(f"--auth-supernode-private-key={keys}/client-{number}/node.key")
            node = ["flower-supernode", *where, *known, "--node-config", own]
            running.enter_context(started(folder, f"node-{number}", node, env))
        config = f'settings="{" ".join(settings)}" keys="{keys}" out="{folder}/run"'
        output = flwr(env, "run", str(APP), "here", "--stream", "--run-config", config)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = [later["seconds"] - earlier["seconds"] for earlier, later in pairwise(metrics)]
    make(folder, "verify", "run")
    return {
        "clients": clients,
        "k": k,
        "rounds": rounds,
        "seconds": {
            "median": round(statistics.median(seconds), 1),
            "least": round(min(seconds), 1),
            "most": round(max(seconds), 1),
        },
        "dropouts": summary["dropouts"],
        "all_hold_the_last_weights": f"{clients} of {clients} clients hold the last weights" in output,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[3, 10])
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    rows = list[dict[str, Any]]()
    load = round(os.getloadavg()[0], 1)
    for clients in chosen.clients:
        with tempfile.TemporaryDirectory() as name:
            rows.append(play(Path(name), clients, chosen.k, chosen.rounds))
    if chosen.json:
        print(json.dumps({"cores": os.cpu_count(), "load_before": load, "stock": rows}, indent=2))
    else:
        for row in rows:
            print("\n".join(f"{name:26}{value}" for name, value in row.items()), end="\n\n")
    return 0 if all(row["all_hold_the_last_weights"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
