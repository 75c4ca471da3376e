"""How the cost of a round grows: with K, with the number of weights, with the batch and with the number of clients.

    python benchmarks/scale.py --json

CPU time on one thread. A straight line is fitted to each row of figures: its slope is the cost of one more, and `r2`
says how straight the row is. The points of a row take turns, and the least time of each counts, because other work on
the machine only adds to it. Memory is the peak of a separate process that simulates one round of 1,000 or 10,000
clients with 20 samples each, of which 100 take part, and of one that only loads what it needs.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baffle.core.arrays import F32
from baffle.core.directions import RADEMACHER, Directions, dense
from baffle.core.ports import Batch
from baffle.core.probe import forward_difference
from baffle.data.sources import Dataset, Source
from baffle.models.networks import lenet
from baffle.plan import load
from baffle.runtime.torch.loss import TorchLoss, one_thread_each, weights_of
from baffle.simulation import simulate
from baffle.task.load import load_task

SAMPLES_EACH, ATTENDING = 20, 100
Work = Callable[[], object]


def many() -> Source:
    """Samples for 10,000 clients: noise, because only costs matter here."""
    random = np.random.default_rng(0)
    count = 10_000 * SAMPLES_EACH
    x = random.normal(size=(count, 1, 8, 8)).astype(np.float32)
    y = random.integers(0, 10, count)

    def as_it_is(samples: Any) -> F32:
        return np.asarray(samples)

    return Source(Dataset(x, y, as_it_is), Dataset(x[:100], y[:100], as_it_is), 10)


def probing(k: int, channels: tuple[int, int], batch: int) -> Work:
    """One probe of one client."""
    module = lenet((1, 28, 28), 10, channels)
    weights, random = weights_of(module), np.random.default_rng(0)
    samples = Batch(random.normal(size=(batch, 1, 28, 28)).astype(np.float32), random.integers(0, 10, batch))
    loss, directions = TorchLoss(module).on(samples), Directions(bytes(32), RADEMACHER)
    return lambda: forward_difference(loss, weights, directions, dense(len(weights), k), 1e-3)


def rounds(clients: int) -> Work:
    """Three rounds of a federation, with secure sums."""

    def work() -> None:
        settings = [f"federation.clients={clients}", "rounds=3", "run.workers=1", "federation.batch=16"]
        with tempfile.TemporaryDirectory() as folder:
            simulate(load("digits", settings), Path(folder) / "run")

    return work


def seconds(works: Sequence[Work], turns: int) -> list[float]:
    works[0]()  # so that what happens only once is not measured
    taken = [[0.0] * turns for _ in works]
    for turn in range(turns):
        for number, work in enumerate(works):
            began = time.process_time()
            work()
            taken[number][turn] = time.process_time() - began
    return [min(times) for times in taken]


def line(name: str, x: Sequence[float], works: Sequence[Work], turns: int) -> dict[str, Any]:
    y = seconds(works, turns)
    slope, start = np.polyfit(x, y, 1)
    residuals = np.array(y) - (slope * np.array(x) + start)
    r2 = 1 - float(np.sum(residuals**2) / np.sum((np.array(y) - np.mean(y)) ** 2))
    return {
        "against": name,
        "x": list(x),
        "cpu_ms": [round(1e3 * taken, 2) for taken in y],
        "ms_for_one_more": round(1e3 * float(slope), 5),
        "r2": round(r2, 4),
    }


def weights_in(channels: tuple[int, int]) -> int:
    return len(weights_of(lenet((1, 28, 28), 10, channels)))


def peak_mb(clients: int) -> float:
    """This process's peak memory after one round of this many clients; with 0, after loading what a round needs."""
    settings = [
        *("task.data=scale:many", f"federation.clients={clients or ATTENDING}", "rounds=1", "federation.batch=0"),
        f"federation.participation={ATTENDING / (clients or ATTENDING)}",
    ]
    plan = load("digits", settings)
    with tempfile.TemporaryDirectory() as folder:
        if clients:
            simulate(plan, Path(folder) / "run")
        else:
            load_task(plan)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)


def peak_mb_of_new_process(clients: int) -> float:
    """The same for a new process."""
    done = subprocess.run(
        [sys.executable, __file__, "--memory", str(clients)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--memory", type=int, metavar="CLIENTS", help="only the memory of one round of CLIENTS clients")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.memory is not None:
        print(peak_mb(args.memory))
        return
    ks, batches, crowds = [25, 50, 100, 200], [8, 16, 32, 64], [5, 10, 20, 40]
    widths = [(8, 32), (16, 64), (16, 128), (16, 256)]
    if args.quick:
        ks, batches, crowds, widths = [2, 4], [4, 8], [3, 6], [(4, 8), (8, 16)]
    with one_thread_each():
        lines = [
            line("K", ks, [probing(k, (16, 64), 32) for k in ks], args.turns),
            line("weights", [weights_in(w) for w in widths], [probing(25, w, 32) for w in widths], args.turns),
            line("batch", batches, [probing(25, (16, 64), batch) for batch in batches], args.turns),
            line("clients", crowds, [rounds(clients) for clients in crowds], args.turns),
        ]
    crowds_in_memory = (0,) if args.quick else (0, 1000, 10_000)
    memory = {str(clients): peak_mb_of_new_process(clients) for clients in crowds_in_memory}
    if args.json:
        print(json.dumps({"lines": lines, "peak_mb": memory}, indent=2))
        return
    for row in lines:
        fit = f"one more {row['ms_for_one_more']} ms, r² {row['r2']}"
        print(f"against {row['against']:8} {row['x']} → {row['cpu_ms']} ms; {fit}")
    print("peak memory, MB, by clients (0: only loaded):", memory)


if __name__ == "__main__":
    main()
