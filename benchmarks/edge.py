"""Memory of a client on ONNX Runtime: whole processes without PyTorch that take part in secure rounds.

python benchmarks/edge.py           # the paper's LeNet on batches of 32, K = 100, three clients
python benchmarks/edge.py --json    # for results/edge.json

Every client is a process of its own, with a folder of its own samples and an exported model. It tells its resident
memory, as the kernel counts it, after the imports, with model and data loaded, and at its peak.
"""

import argparse
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from baffle.aggregation.client.session import ClientSession
from baffle.client.client import Client
from baffle.client.replica import Replica
from baffle.network.edge import edge_worker
from baffle.plan import Plan, load
from baffle.schedule import policy_of, tiers_of
from baffle.trajectory import trajectory_of

FOREIGN = ("torch", "flwr", "onnx", "sklearn", "scipy", "PIL")
"""What a client must not have imported."""

QUIET = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
"""The environment of a client: NumPy's threads and malloc's arenas would each take memory of their own."""


class Membership(msgspec.Struct):
    """What a client needs to be told to take part in secure sums."""

    identity: bytes
    directory: dict[int, bytes]
    run: bytes


def resident_mb(field: str = "VmHWM") -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(4, "big") + message)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes:
    return pipe.read(int.from_bytes(pipe.read(4), "big"))


def take_part(folder: Path, number: int) -> None:
    """A client's whole process: it answers until it is sent nothing, and then tells its memory."""
    memory = {"imports": resident_mb()}
    plan, pipes = load(str(folder / "model" / "plan.toml")), (sys.stdin.buffer, sys.stdout.buffer)
    tiers = tiers_of(plan)
    worker = edge_worker(plan, folder / "model", number, tiers[number], folder / f"client-{number}")
    member = msgspec.msgpack.decode(receive(pipes[0]), type=Membership)
    identity = Ed25519PrivateKey.from_private_bytes(member.identity)
    policy = policy_of(worker.trajectory, dict(enumerate(tiers)))
    session = ClientSession(number, identity, member.directory, member.run, policy)
    client = Client(Replica(worker.trajectory), worker, session)
    memory["loaded"] = resident_mb()
    while message := receive(pipes[0]):
        send(pipes[1], client.answer(message))
    memory |= {"peak": resident_mb(), "after": resident_mb("VmRSS")}
    send(pipes[1], json.dumps({"memory_mb": memory, "foreign": [m for m in FOREIGN if m in sys.modules]}).encode())


class Processes:
    """A transport to clients in processes of their own."""

    def __init__(self, folder: Path, clients: int) -> None:
        command = [sys.executable, __file__, "--folder", str(folder), "--client"]
        self._clients = [
            subprocess.Popen(
                [*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | QUIET
            )
            for number in range(clients)
        ]

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        self.tell(requests)
        return {number: self._hear(number) for number in requests}

    def tell(self, messages: Mapping[int, bytes]) -> None:
        for number, message in messages.items():
            pipe = self._clients[number].stdin
            assert pipe
            send(pipe, message)

    def finish(self) -> list[dict[str, Any]]:
        self.tell(dict.fromkeys(range(len(self._clients)), b""))
        told = [json.loads(self._hear(number)) for number in range(len(self._clients))]
        for client in self._clients:
            client.communicate()
        return told

    def _hear(self, number: int) -> bytes:
        pipe = self._clients[number].stdout
        assert pipe
        return receive(pipe)


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


def write_samples(folder: Path, samples: int, seed: int) -> None:
    """Files like MNIST's with pixels at random: memory does not depend on what they show."""
    random = np.random.default_rng(seed)
    folder.mkdir()
    for name, count in (("train", samples), ("t10k", 8)):
        write_idx(folder / f"{name}-images-idx3-ubyte", random.integers(0, 256, (count, 28, 28)).astype(np.uint8))
        write_idx(folder / f"{name}-labels-idx1-ubyte", random.integers(0, 10, count).astype(np.uint8))


def play(folder: Path, plan: Plan, rounds: int) -> dict[str, Any]:
    """A server with one process for each client, for so many secure rounds."""
    from baffle.aggregation.server.secure_sum import SecureSum
    from baffle.journal.replay import catch_up
    from baffle.journal.store import Journal
    from baffle.runtime.onnx.model_folder import WEIGHTS, read_manifest, read_weights
    from baffle.server.downlink import Downlink
    from baffle.server.round import play_round

    manifest = read_manifest(folder / "model")
    trajectory, run = trajectory_of(plan, manifest.n_weights), secrets.token_bytes(32)
    identities = [Ed25519PrivateKey.generate() for _ in range(plan.federation.clients)]
    directory = {i: identity.public_key().public_bytes_raw() for i, identity in enumerate(identities)}
    processes = Processes(folder, plan.federation.clients)
    processes.tell(
        {
            i: msgspec.msgpack.encode(Membership(own.private_bytes_raw(), directory, run))
            for i, own in enumerate(identities)
        }
    )
    sums = SecureSum(
        trajectory.ring, trajectory.length, run, directory, policy_of(trajectory, dict(enumerate(tiers_of(plan))))
    )
    initial = trajectory.rule.start(read_weights(folder / "model" / WEIGHTS, manifest))
    contributions = 0
    with Journal.create(folder / "journal.sqlite", plan, initial, {}) as journal:
        present, downlink = catch_up(journal, trajectory), Downlink("scalars", journal)
        for _ in range(rounds):
            played = play_round(trajectory, present, processes, sums, journal, downlink)
            present = played.present
            contributions += played.metrics["contributors"]
    told = processes.finish()
    return {
        "model": plan.task.model.__struct_config__.tag,
        "n_weights": trajectory.n,
        "k": plan.probe.k,
        "batch": plan.federation.batch,
        "clients": plan.federation.clients,
        "rounds": rounds,
        "contributions": contributions,
        "memory_mb": {stage: round(max(one["memory_mb"][stage] for one in told), 1) for stage in told[0]["memory_mb"]},
        "foreign": sorted({name for one in told for name in one["foreign"]}),
    }


def measure(rounds: int, k: int, samples: int) -> dict[str, Any]:
    from baffle.export import export_plan

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = [f"probe.k={k}", "federation.clients=3", 'federation.level="batch"', f"rounds={rounds}"]
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
    found = measure(args.rounds, args.k, args.samples)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        for stage, mb in found["memory_mb"].items():
            print(f"{stage:10}{mb:8.1f} MB")
    return None


if __name__ == "__main__":
    main()
