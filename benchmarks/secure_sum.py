"""What a secure sum costs: CPU time per phase and client, CPU time of the server, bytes up and down per client.

    python benchmarks/secure_sum.py                       # n = 10, 100, 1000; 0 and 30 % dropout; K = 1000
    python benchmarks/secure_sum.py --json --clients 10   # one size, as JSON

The real client and server halves in one process, without a transport. A list of keys is signed once and serves 64
rounds; its share of a round is counted in the bytes, its making and checking in `list`. Every sum is compared with the
plain one.
"""

import argparse
import json
import secrets
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baffle.app.simulate import simulate
from baffle.core.messages import CatchUp, Contribution, RoundRequest, encode
from baffle.core.ring import add
from baffle.plan import load
from baffle.secure.messages import Opening, Turn, Turned
from baffle.secure.session import KEYS_AT_ONCE, ClientSession, ServerSlot
from baffle.secure.terms import Terms, checked_slot


def one(n: int, k: int, dropout: float, *, agreement: bool = False) -> dict[str, Any]:
    """One round of n clients after their key lists have been exchanged."""
    clock = time.process_time
    run, seed, members = secrets.token_bytes(32), secrets.token_bytes(32), tuple(range(n))
    identities = {i: Ed25519PrivateKey.generate() for i in members}
    directory = {i: identity.public_key().public_bytes_raw() for i, identity in identities.items()}
    terms = Terms(agreement=agreement)
    clients = {i: ClientSession(i, identities[i], directory, run, terms) for i in members}
    drawn = terms.graph(members, seed)
    threshold = terms.least_threshold(drawn, n)

    began = clock()
    lists = {i: client.advertise(0) for i, client in clients.items()}
    encoded = {i: encode(one) for i, one in lists.items()}

    def opening(slot: int, client: int) -> Opening:
        peers = tuple(encoded[peer] for peer in drawn.neighbours[client]) if slot == 0 else ()
        return Opening(slot, members, threshold, 2, seed, peers)

    for i, client in clients.items():
        client.seal(opening(0, i))
    listed = clock() - began

    slot = ServerSlot(run, checked_slot(opening(1, 0), terms), lists)
    began = clock()
    sealed = {i: client.seal(opening(1, i)) for i, client in clients.items()}
    sealing = clock() - began

    request = RoundRequest(1, 1, bytes(32), bytes(32), CatchUp("outcomes", 0, ()))
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
    up = len(encode(Contribution(1, bytes(4 * k)))) + len(encode(Turned(unmasked[first], sealed[first], "")))
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
        "client_ms": {
            "list": round(listed / n / KEYS_AT_ONCE * 1e3, 3),
            "share": round(sealing / n * 1e3, 2),
            "mask": round(masking / len(alive) * 1e3, 2),
            "agree": round(agreeing / len(alive) * 1e3, 2),
            "unmask": round(unmasking / len(alive) * 1e3, 2),
        },
        "server_cpu_seconds": round(server, 4),
        "all_cpu_ms": round((sealing + masking + agreeing + unmasking + server + listed / KEYS_AT_ONCE) * 1e3, 1),
        "up_bytes": round(up + keys),
        "down_bytes": round(down + keys * drawn.k),
    }


def slowdown(settings: list[str], turns: int) -> dict[str, float]:
    """What the secure sum adds to a round of the default plan: CPU seconds with it and without, taken in turn."""
    spent: dict[str, list[float]] = {"on": [], "off": []}
    for _ in range(turns):
        for mode, times in spent.items():
            plan = load("digits", [f"secure.mode={mode}", "run.evaluate_every=1000", *settings])
            with tempfile.TemporaryDirectory() as folder:
                began = time.process_time()
                simulate(plan, Path(folder) / "run")
                times.append((time.process_time() - began) / plan.rounds)
    on, off = min(spent["on"]), min(spent["off"])
    return {
        "round_cpu_ms": round(1e3 * off, 2),
        "secure_cpu_ms": round(1e3 * (on - off), 2),
        "slower_by": round(on / off - 1, 4),
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
    parser.add_argument("--repeat", type=int, default=1, help="keep the quickest of so many rounds")
    parser.add_argument(
        "--slowdown", action="store_true", help="what it adds to rounds of the default plan, and of longer ones"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.slowdown:
        plans = {"the default plan": ["rounds=40"], "the default plan with K = 600": ["rounds=6", "probe.k=600"]}
        print(json.dumps({name: slowdown(settings, args.repeat) for name, settings in plans.items()}, indent=2))
        return
    rows = []
    for n in args.clients:
        for dropout in (0.0, 0.3):
            tried = [one(n, args.k, dropout, agreement=args.agreement) for _ in range(args.repeat)]
            rows.append(min(tried, key=lambda row: float(row["all_cpu_ms"])))
            if not args.json:
                print(table(rows[-1]), flush=True)
    if args.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
