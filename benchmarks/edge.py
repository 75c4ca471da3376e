"""Memory of a client on ONNX Runtime: whole processes without PyTorch that take part in secure rounds.

python benchmarks/edge.py           # the paper's LeNet on batches of 32, K = 100, three clients
python benchmarks/edge.py --json    # for results/edge.json

Every client is a separate process with an exported model and a folder with its own samples. It reports its resident
memory, as the kernel counts it: after the imports, with model and data loaded, and at its peak; and the CPU time of its
rounds. All of it twice, the second time with an exact head.
"""

import argparse
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from baffle.aggregation.client.session import ClientSession
from baffle.client.client import Client, contribution_bytes
from baffle.client.replica import Replica
from baffle.lineage import Lineage
from baffle.network.member.edge import edge_equipment
from baffle.plan import Plan, load
from baffle.schedule import policy_of, tiers_of
from baffle.trajectory import trajectory_of

FOREIGN = ("torch", "flwr", "onnx", "sklearn", "scipy", "PIL")
"""Libraries that a client must not have imported."""

QUIET = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
"""The environment of a client: each of NumPy's threads and of malloc's arenas would take more memory."""


class Membership(msgspec.Struct):
    """What a client must know to take part in secure sums."""

    identity: bytes
    directory: dict[int, bytes]
    run: bytes


def resident_mb(field: str = "VmHWM") -> float:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) / 1024 if match else 0.0


def send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(4, "big") + message)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes:
    return pipe.read(int.from_bytes(pipe.read(4), "big"))


def take_part(folder: Path, number: int) -> None:
    """A client's whole process: it answers messages until an empty one comes, and then reports its memory."""
    memory = {"imports": resident_mb()}
    plan, pipes = load(str(folder / "model" / "plan.toml")), (sys.stdin.buffer, sys.stdout.buffer)
    tiers = tiers_of(plan)
    worker, initial = edge_equipment(plan, folder / "model", number, folder / f"client-{number}")
    worker = replace(worker, k=tiers[number])
    member = msgspec.msgpack.decode(receive(pipes[0]), type=Membership)
    identity = Ed25519PrivateKey.from_private_bytes(member.identity)
    policy = policy_of(worker.trajectory, dict(enumerate(tiers)), member.run)
    session = ClientSession(number, identity, member.directory, member.run, policy)
    lineage = Lineage(worker.trajectory)
    state = lineage.trajectory.rule.start(initial())
    client = Client(Replica(lineage, lineage.beginning(state)), worker, session)
    memory["loaded"] = resident_mb()
    began = time.process_time()
    while message := receive(pipes[0]):
        send(pipes[1], client.answer(message))
    seconds = time.process_time() - began
    memory |= {"peak": resident_mb(), "after": resident_mb("VmRSS")}
    foreign = [m for m in FOREIGN if m in sys.modules]
    send(pipes[1], json.dumps({"memory_mb": memory, "foreign": foreign, "cpu_seconds": seconds}).encode())


class Processes:
    """A transport to clients in separate processes."""

    def __init__(self, folder: Path, clients: int) -> None:
        command = [sys.executable, __file__, "--folder", str(folder), "--client"]
        self._clients = [
            subprocess.Popen(
                [*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | QUIET
            )
            for number in range(clients)
        ]

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        self.send_all(requests)
        return {number: self._receive_from(number) for number in requests}

    def send_all(self, messages: Mapping[int, bytes]) -> None:
        for number, message in messages.items():
            pipe = self._clients[number].stdin
            assert pipe
            send(pipe, message)

    def finish(self) -> list[dict[str, Any]]:
        """End all clients, and return their reports."""
        self.send_all(dict.fromkeys(range(len(self._clients)), b""))
        reports = [json.loads(self._receive_from(number)) for number in range(len(self._clients))]
        for client in self._clients:
            client.communicate()
        return reports

    def _receive_from(self, number: int) -> bytes:
        pipe = self._clients[number].stdout
        assert pipe
        return receive(pipe)


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


def write_samples(folder: Path, samples: int, seed: int) -> None:
    """Write files like MNIST's with random pixels: memory does not depend on what the images show."""
    random = np.random.default_rng(seed)
    folder.mkdir()
    for name, count in (("train", samples), ("t10k", 8)):
        write_idx(folder / f"{name}-images-idx3-ubyte", random.integers(0, 256, (count, 28, 28)).astype(np.uint8))
        write_idx(folder / f"{name}-labels-idx1-ubyte", random.integers(0, 10, count).astype(np.uint8))


def play(folder: Path, plan: Plan, rounds: int) -> dict[str, Any]:
    """Play this many secure rounds, with one process for each client."""
    from baffle.aggregation.server.secure_sum import SecureSum
    from baffle.journal.replay import catch_up
    from baffle.journal.store import Journal
    from baffle.runtime.onnx.model_folder import initial_weights, read_manifest
    from baffle.server.downlink import Downlink
    from baffle.server.round import play_round

    manifest = read_manifest(folder / "model")
    trajectory, run = trajectory_of(plan, manifest.n_weights), secrets.token_bytes(32)
    identities = [Ed25519PrivateKey.generate() for _ in range(plan.federation.clients)]
    directory = {i: identity.public_key().public_bytes_raw() for i, identity in enumerate(identities)}
    processes = Processes(folder, plan.federation.clients)
    processes.send_all(
        {
            i: msgspec.msgpack.encode(Membership(identity.private_bytes_raw(), directory, run))
            for i, identity in enumerate(identities)
        }
    )
    policy = policy_of(trajectory, dict(enumerate(tiers_of(plan))), run)
    sums = SecureSum(trajectory.ring, trajectory.length, run, directory, policy)
    initial = trajectory.rule.start(initial_weights(folder / "model", manifest))
    lineage, contributions = Lineage(trajectory), 0
    with Journal.create(folder / "journal.sqlite", plan, initial, {}) as journal:
        present, downlink = catch_up(journal, lineage), Downlink("scalars", journal, lineage)
        for _ in range(rounds):
            played = play_round(trajectory, present, processes, sums, journal, downlink)
            present = played.present
            contributions += played.metrics["contributors"]
    reports = processes.finish()
    stages = reports[0]["memory_mb"]
    return {
        "model": plan.task.model.__struct_config__.tag,
        "n_weights": trajectory.n,
        "k": plan.probe.k,
        "batch": plan.federation.batch,
        "clients": plan.federation.clients,
        "rounds": rounds,
        "contributions": contributions,
        "vector_bytes": contribution_bytes(trajectory),
        "cpu_seconds_per_round": round(sum(report["cpu_seconds"] for report in reports) / len(reports) / rounds, 2),
        "memory_mb": {stage: round(max(report["memory_mb"][stage] for report in reports), 1) for stage in stages},
        "foreign": sorted({name for report in reports for name in report["foreign"]}),
    }


def measure(rounds: int, k: int, samples: int, head: str) -> dict[str, Any]:
    from baffle.export import export_plan

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = [f"probe.k={k}", "federation.clients=3", 'federation.level="batch"', f"rounds={rounds}"]
        settings.append(f"probe.head={head}")
        for number in range(3):
            write_samples(folder / f"client-{number}", samples, number)
        export_plan("paper-mnist-lenet", folder / "model", settings, data=folder / "client-0")
        return play(folder, load(str(folder / "model" / "plan.toml")), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        return take_part(args.folder, args.client)
    measured, exact = (measure(args.rounds, args.k, args.samples, head) for head in ("probed", "exact"))
    if args.json:
        print(json.dumps(measured | {"exact_head": exact}, indent=2))
    else:
        for found in (measured, exact):
            print(*(f"{stage} {mb:.1f} MB" for stage, mb in found["memory_mb"].items()), sep="  ")
    return None


if __name__ == "__main__":
    main()
