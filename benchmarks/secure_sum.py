"""What a secure sum costs: CPU time per phase and client, CPU time of the server, bytes up and down per client.

    python benchmarks/secure_sum.py                       # n = 10, 100, 1000; 0 and 30 % dropout; K = 1000
    python benchmarks/secure_sum.py --json --clients 10   # one size, as JSON

The real client and server halves run in one process, without a transport. A list of keys is signed once and serves 128
rounds. A 128th of its bytes counts for each round, and so does a 128th of the time to make and check it (`list`). Every
sum is compared with the plain one.
"""

import argparse
import hmac
import json
import secrets
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from baffle.aggregation.client.session import KEYS_AT_ONCE, ClientSession
from baffle.aggregation.client_policy import ClientPolicy, checked_slot
from baffle.aggregation.messages import Opening, Turn, Turned
from baffle.aggregation.server.secure_sum import SecureSum
from baffle.aggregation.server.slot import ServerSlot
from baffle.aggregation.shares import SHARE_BYTES
from baffle.client.client import Client
from baffle.client.worker import Worker
from baffle.core.messages import CatchUp, Contribution, RoundRequest, encode
from baffle.core.ring import add
from baffle.plan import load
from baffle.server.recorder import Progress
from baffle.simulation import simulate


def one_round(n: int, k: int, dropout: float, *, agreement: bool = False) -> dict[str, Any]:
    """One round of n clients, after they have exchanged their lists of keys."""
    clock = time.process_time
    run, members = secrets.token_bytes(32), tuple(range(n))
    identities = {i: Ed25519PrivateKey.generate() for i in members}
    directory = {i: identity.public_key().public_bytes_raw() for i, identity in identities.items()}
    policy = ClientPolicy(agreement=agreement)
    clients = {i: ClientSession(i, identities[i], directory, run, policy) for i in members}
    graphs = [policy.graph(members, slot) for slot in range(2)]
    drawn = graphs[1]
    threshold = policy.least_threshold(drawn, n)

    began = clock()
    lists = {i: client.advertise(0) for i, client in clients.items()}
    encoded = {i: encode(keys) for i, keys in lists.items()}

    def opening(slot: int, client: int) -> Opening:
        met = {peer for graph in graphs for peer in graph.neighbours[client]} if slot == 0 else ()
        return Opening(slot, members, threshold, 2, tuple(encoded[peer] for peer in sorted(met)))

    for i, client in clients.items():
        client.seal(opening(0, i))
    listed = clock() - began

    slot = ServerSlot(run, checked_slot(opening(1, 0), policy), lists)
    began = clock()
    sealed = {i: client.seal(opening(1, i)) for i, client in clients.items()}
    sealing = clock() - began

    request = RoundRequest(1, bytes(32), bytes(32), bytes(32), CatchUp("outcomes", 0, ()))
    began = clock()
    for i, boxes in sealed.items():
        slot.take_sealed(i, boxes)
    requests = slot.requests(dict.fromkeys(members, request))
    server = clock() - began

    vectors = {i: np.frombuffer(secrets.token_bytes(4 * k), np.uint32) for i in members}
    gone = set(np.random.default_rng(0).permutation(n)[: round(dropout * n)].tolist())
    alive = [i for i in members if i not in gone]
    began = clock()
    masked = {i: clients[i].mask(requests[i], partial(vectors.__getitem__, i)) for i in alive}
    masking = clock() - began
    began = clock()
    for i, vector in masked.items():
        slot.take_vector(i, vector, k)
    about = slot.survivors()
    server += clock() - began
    agreeing = 0.0
    if agreement:
        began = clock()
        agreed = {i: clients[i].agree(about) for i in alive}
        agreeing = clock() - began
        began = clock()
        for i, signature in agreed.items():
            slot.take_agreed(i, signature, directory[i])
        server += clock() - began
    unmask = slot.unmask()
    began = clock()
    unmasked = {i: clients[i].unmask(unmask) for i in alive}
    unmasking = clock() - began
    began = clock()
    for i, shares in unmasked.items():
        slot.take_unmasked(i, shares)
    total = slot.total()
    server += clock() - began

    first = alive[0]
    up = len(encode(Contribution(1, bytes(4 * k)))) + len(encode(Turned(unmasked[first], sealed[first])))
    down = len(encode(requests[first])) + len(encode(Turn(unmask, opening(1, first))))
    if agreement:
        up, down = up + len(encode(agreed[first])), down + len(encode(about))
    keys = len(encoded[first]) / KEYS_AT_ONCE
    return {
        "clients": n,
        "neighbours": drawn.k,
        "threshold": threshold,
        "agreement": agreement,
        "dropout": dropout,
        "k": k,
        "exact": bool(np.array_equal(total, add([vectors[i] for i in alive]))),
        "seconds": {
            "list": listed / KEYS_AT_ONCE,
            "share": sealing,
            "mask": masking,
            "agree": agreeing,
            "unmask": unmasking,
            "server": server,
        },
        "up_bytes": round(up + keys),
        "down_bytes": round(down + keys * drawn.k),
    }


def quickest(n: int, k: int, dropout: float, repeat: int, *, agreement: bool = False) -> dict[str, Any]:
    """The least time that each phase took in `repeat` rounds: other work on the machine only adds to it."""
    rounds = [one_round(n, k, dropout, agreement=agreement) for _ in range(repeat)]
    row = rounds[0] | {"exact": all(row["exact"] for row in rounds)}
    least = {phase: min(row["seconds"][phase] for row in rounds) for phase in row.pop("seconds")}
    working = {"list": n, "share": n} | dict.fromkeys(("mask", "agree", "unmask"), n - round(dropout * n))
    row["client_ms"] = {phase: round(1e3 * least[phase] / count, 3) for phase, count in working.items()}
    row["server_cpu_seconds"] = round(least["server"], 4)
    row["all_cpu_ms"] = round(1e3 * sum(least.values()), 1)
    if repeat > 1 and row["neighbours"] == n - 1:
        row["primitives_ms"] = round(min(primitives(n, k) for _ in range(repeat)), 1)
    return row


def primitives(n: int, k: int) -> float:
    """Milliseconds of CPU that the cryptography of a round alone takes if all n clients are neighbours. No
    implementation of the protocol with this library can take less."""
    own, peer = X25519PrivateKey.generate(), X25519PrivateKey.generate().public_key().public_bytes_raw()
    key, text, pairs = secrets.token_bytes(32), bytes(2 * SHARE_BYTES), n * (n - 1)
    box = ChaCha20Poly1305(key).encrypt(bytes(12), text, None)
    identity = Ed25519PrivateKey.generate()
    public, signature = identity.public_key(), identity.sign(text)

    began = time.process_time()
    for _ in range(n):
        X25519PrivateKey.generate()
    for _ in range(pairs):
        own.exchange(X25519PublicKey.from_public_bytes(peer))  # a mask
        ChaCha20Poly1305(key).encrypt(bytes(12), text, None)
        ChaCha20Poly1305(key).decrypt(bytes(12), box, None)
    for _ in range(pairs + 2 * n):  # every pair's masks, and each self mask twice: it is added and removed
        Cipher(ChaCha20(hmac.digest(key, text, "sha256"), bytes(16)), mode=None).encryptor().update(bytes(4 * k))
    for _ in range(pairs // KEYS_AT_ONCE):
        public.verify(signature, text)
    return 1e3 * (time.process_time() - began)


class Meter:
    """Measures the CPU seconds that threads spend inside chosen methods."""

    def __init__(self) -> None:
        self._lock, self.spent = threading.Lock(), defaultdict[str, float](float)

    def around(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def metered(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                with self._lock:
                    self.spent[name] += time.thread_time() - began

        return metered


def overhead(settings: list[str]) -> dict[str, float]:
    """How much of a run's CPU time the secure sum takes: everything that clients do except for their probes, and
    everything that the server does except for rebuilding and stepping. It is measured within one run, because on a
    machine that does other things too, two runs of the same plan differ by more than this."""
    meter, plan = Meter(), load("digits", ["run.evaluate_every=1000000", *settings])
    marks = list[tuple[float, float]]()

    def after_round(progress: Progress) -> None:
        if float(progress.rounds_done).is_integer():
            spent = meter.spent
            marks.append((time.process_time(), spent["answer"] - spent["probe"] + spent["collect"]))

    with (
        mock.patch.object(Client, "answer", meter.around(Client.answer, "answer")),
        mock.patch.object(Worker, "vector", meter.around(Worker.vector, "probe")),
        mock.patch.object(SecureSum, "collect", meter.around(SecureSum.collect, "collect")),
        tempfile.TemporaryDirectory() as folder,
    ):
        simulate(plan, Path(folder) / "run", watch=after_round)
    rounds = np.diff(np.array(marks[:-1]), axis=0)  # without the first round, and without the last, which evaluates
    cpu, secure = rounds.sum(0)
    return {
        "rounds": len(rounds),
        "round_cpu_ms": round(1e3 * (cpu - secure) / len(rounds), 2),
        "secure_cpu_ms": round(1e3 * secure / len(rounds), 2),
        "slower_by": round(secure / (cpu - secure), 4),
    }


def table(row: dict[str, Any]) -> str:
    ms = row["client_ms"]
    agree = f" / agree {ms['agree']:.1f}" if row["agreement"] else ""
    return (
        f"n {row['clients']:5}  neighbours {row['neighbours']:4}  t {row['threshold']:4}  "
        f"dropped {row['dropout']:3.0%}  values {row['k']:,}  "
        f"client ms: share {ms['share']:.1f} / mask {ms['mask']:.1f}{agree} / "
        f"unmask {ms['unmask']:.1f}  server {row['server_cpu_seconds']:.3f} s  "
        f"up {row['up_bytes']:,}  down {row['down_bytes']:,}  exact {row['exact']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--k", type=int, default=1000)
    parser.add_argument("--agreement", action="store_true", help='as in secure.mode = "malicious-server"')
    parser.add_argument("--repeat", type=int, default=1, help="rounds, of which the least time of each phase counts")
    parser.add_argument(
        "--slowdown", action="store_true", help="what it adds to rounds of the default plan, and to longer rounds"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.slowdown:
        plans = {"the default plan": ["rounds=130"], "the default plan with K = 600": ["rounds=12", "probe.k=600"]}
        print(json.dumps({name: overhead(settings) for name, settings in plans.items()}, indent=2))
        return
    rows = []
    for n in args.clients:
        for dropout in (0.0, 0.3):
            rows.append(quickest(n, args.k, dropout, args.repeat, agreement=args.agreement))
            if not args.json:
                print(table(rows[-1]), flush=True)
    if args.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
