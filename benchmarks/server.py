"""What a round costs the server: the rebuild of the gradient, and the replay of a whole round with its chain hash.

    python benchmarks/server.py                           # n = 10^5, 10^6, 10^7; K = 20, 100, 1000; about five minutes
    python benchmarks/server.py --full                    # with K = 1000 at n = 10^7, too
    python benchmarks/server.py --json --n 1000000 --k 20 # one size, as JSON

Times are CPU nanoseconds per number of a direction (there are n · K of them); `wall` is beside them where threads
matter. The reference draws whole directions and multiplies them as float64 rows. Every sum is compared with the
reference's. The same run measures yardsticks: AES alone, a float64 sum and a copy of large arrays, and SHA-256.
"""

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB

from baffle.core.arrays import F32, I32, I64, U8, Integers
from baffle.core.directions import GAUSSIAN, RADEMACHER, Directions, Distribution, dense, gaussian_table
from baffle.core.messages import Group, Outcome
from baffle.core.rebuild import gradient_from_scalars, rebuild
from baffle.core.ring import Ring
from baffle.core.seeds import keystream
from baffle.core.state import Rule, ServerState, apply, chain_next
from baffle.core.update import adam, average, clip, compose

KEY = bytes(range(32))
RING = Ring(clients=10, n_max=100, clip=50.0)


def reference(totals: I32, directions: Directions, n: int) -> I64:
    """Rebuild with whole directions as float64 rows, 2^18 numbers at a time."""
    total, rows = np.zeros(n, np.int64), max(1, min(128, (1 << 18) // n))
    per_block = 128 // directions.distribution.bits
    for start in range(0, len(totals), rows):
        numbers = range(start, min(start + rows, len(totals)))
        stream = keystream(directions.key, numbers, 0, -(-n // per_block))
        z = _decoded(stream, directions.distribution)[:, :n].astype(np.float64)
        total += (totals[numbers.start : numbers.stop].astype(np.float64) @ z).astype(np.int64)
    return total


def _decoded(stream: U8, distribution: Distribution) -> Integers:
    if distribution.name == "gaussian":
        return gaussian_table().take(stream.view("<u2"), mode="wrap")
    bits = np.unpackbits(stream, axis=1, bitorder="little")
    bits <<= 1
    bits -= 1
    return bits.view(np.int8)


def rule_with(n: int, k: int, distribution: Distribution, threads: int) -> Rule:
    """The rule of the paper's runs: clip, Adam and a moving average."""
    supports = dense(n, k)

    def gradient(outcome: Outcome, _step: int = 0) -> F32:
        (group,) = outcome.groups
        directions = Directions(KEY, distribution)
        return gradient_from_scalars(group.numbers(), group.weight, directions, supports, n, RING, threads=threads)

    return Rule(gradient, compose(clip(0.3), adam(0.01)), average(0.995))


def replayed(rule: Rule, state: ServerState, outcome: Outcome) -> bytes:
    return chain_next(bytes(32), outcome.groups[0].totals, apply(rule, state, outcome))


def measure(n: int, k: int, distribution: Distribution, repeat: int) -> dict[str, Any]:
    """One size. The ways take turns, and the quickest turn of each counts: the machine may be busy with other work."""
    totals = np.random.default_rng(0).integers(-(2**31), 2**31, k).astype(np.int32)
    directions, supports = Directions(KEY, distribution), dense(n, k)
    outcome = Outcome(0, "scalars", (Group(0, totals.astype("<i4").tobytes(), 1000),))
    rules = {threads: rule_with(n, k, distribution, threads) for threads in (1, 2)}
    state = rules[1].start(np.linspace(-1, 1, n, dtype=np.float32))
    rebuilds: dict[str, Callable[[], I64]] = {
        "reference": lambda: reference(totals, directions, n),
        "rebuild": lambda: rebuild(totals, directions, supports, n),
        "rebuild_2": lambda: rebuild(totals, directions, supports, n, threads=2),
    }
    replays: dict[str, Callable[[], bytes]] = {
        "replay": lambda: replayed(rules[1], state, outcome),
        "replay_2": lambda: replayed(rules[2], state, outcome),
        "hash": state.digest,
    }
    times: dict[str, tuple[float, float]] = {}
    sums, chains = list[I64](), set[bytes]()
    for _ in range(repeat):
        sums.clear()
        for name, rebuilding in rebuilds.items():
            sums.append(_timed(times, name, rebuilding))
        for name, replaying in replays.items():
            link = _timed(times, name, replaying)
            if name != "hash":
                chains.add(link)
    few, dense_few = totals[:3], dense(n, min(3, k))
    return {
        "n": n,
        "k": k,
        "distribution": distribution.name,
        "exact": all(np.array_equal(sums[0], other) for other in sums[1:]) and len(chains) == 1,
        "cpu_ns_per_number": {name: round(cpu / (n * k) * 1e9, 3) for name, (cpu, _) in times.items()},
        "wall_ns_per_number": {name: round(wall / (n * k) * 1e9, 3) for name, (_, wall) in times.items()},
        "cpu_seconds": {name: round(cpu, 4) for name, (cpu, _) in times.items()},
        "peak_megabytes": {
            "reference": _peak(lambda: reference(few, directions, n)),
            "rebuild": _peak(lambda: rebuild(few, directions, dense_few, n)),
            "rebuild_2": _peak(lambda: rebuild(few, directions, dense_few, n, threads=2)),
            "replay": _peak(lambda: replayed(rules[1], state, outcome)) if n * k <= 10**8 else None,
        },
    }


def _timed(times: dict[str, tuple[float, float]], name: str, work: Callable[[], Any]) -> Any:
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    spent = time.process_time() - cpu, time.perf_counter() - wall
    times[name] = min(times.get(name, spent), spent)
    return result


def _peak(work: Callable[[], object]) -> float:
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return round(peak / 1e6, 1)


def yardsticks() -> dict[str, float]:
    """Speeds in GB/s on one core, the best of five turns."""
    a, b = np.ones(1 << 23), np.ones(1 << 23)
    small, encrypted = np.zeros(1 << 18, np.uint8), np.empty((1 << 18) + 15, np.uint8)
    encryptor = Cipher(AES256(KEY), ECB()).encryptor()
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2 * a.nbytes, lambda: np.copyto(a, b)),
        "float64_sum": (3 * a.nbytes, lambda: np.add(a, b, out=a)),
        "aes": (64 * small.nbytes, lambda: [encryptor.update_into(small.data, encrypted.data) for _ in range(64)]),
        "sha256": (a.nbytes, lambda: sha256(a.data)),
    }
    times: dict[str, tuple[float, float]] = {}
    for _ in range(5):
        for name, (_, work) in works.items():
            _timed(times, name, work)
    return {name: round(size / times[name][0] / 1e9, 2) for name, (size, _) in works.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--k", type=int, nargs="+", default=[20, 100, 1000])
    parser.add_argument("--repeat", type=int, default=2, help="turns, of which the quickest counts")
    parser.add_argument(
        "--full", action="store_true", help="also sizes of more than 2e9 numbers, which take minutes each"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    speeds, rows = yardsticks(), []
    if not args.json:
        print("  ".join(f"{name} {speed} GB/s" for name, speed in speeds.items()))
        print("AES alone, ns a number:", {d.name: round(d.bits / 8 / speeds["aes"], 3) for d in (GAUSSIAN, RADEMACHER)})
    for n in args.n:
        for k in args.k:
            if n * k > 2 * 10**9 and not args.full:
                continue
            for distribution in (GAUSSIAN, RADEMACHER):  # the sphere is rebuilt as gaussian
                rows.append(row := measure(n, k, distribution, args.repeat if n * k < 5 * 10**8 else 1))
                if not args.json:
                    cpu, wall, peak = row["cpu_ns_per_number"], row["wall_ns_per_number"], row["peak_megabytes"]
                    print(
                        f"n {n:.0e}  K {k:4}  {distribution.name:10}  ns a number: reference {cpu['reference']:6.2f}  "
                        f"rebuild {cpu['rebuild']:5.2f} (wall {wall['rebuild']:5.2f})  "
                        f"on two {cpu['rebuild_2']:5.2f} (wall {wall['rebuild_2']:5.2f})  "
                        f"ratio {cpu['reference'] / cpu['rebuild']:4.1f}  "
                        f"replay {row['cpu_seconds']['replay']:7.3f} s, of it hash {row['cpu_seconds']['hash']:.3f}  "
                        f"peak MB {peak['reference']:.0f} → {peak['rebuild']:.0f}  exact {row['exact']}",
                        flush=True,
                    )
    if args.json:
        print(json.dumps({"gigabytes_per_second": speeds, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
