"""A thousand simulated clients of five samples each: what a round costs, with their samples stacked and without.

    python benchmarks/stacked.py                                  # a table
    python benchmarks/stacked.py --out results/stacked.json       # measure what the file does not have yet
    python benchmarks/stacked.py --clients 20 --json              # ... and print all as JSON

The demo's LeNet at K = 20 on made-up images of 8 × 8, in one process on one thread. A round is whole: batches,
directions, forward passes, sum, step and journal. The CPU time of a round is that of a longer run beyond that of a run
of one round, so neither the start of a run nor the first exchange of keys is in it. Where a round takes long, because
clients are not stacked or sums are secure, that longer run has two rounds, once.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baffle import Dataset, Source
from baffle.core.arrays import F32
from baffle.plan import Plan, load
from baffle.simulation import simulate

EACH, SAMPLES = 5, 5000


class Case(NamedTuple):
    runtime: str
    secure: str
    stacked: bool
    directions: str


CASES = [
    Case("torch", "off", False, "rademacher"),
    Case("torch", "off", True, "rademacher"),
    Case("torch", "off", True, "outer"),
    Case("onnx", "off", False, "rademacher"),
    Case("onnx", "off", True, "rademacher"),
    Case("onnx", "on", True, "rademacher"),
]


def noise(data: Path | None) -> Source:  # noqa: ARG001
    """Five samples for each of a thousand clients."""

    def part(count: int) -> Dataset:
        numbers = np.random.default_rng(count)
        return Dataset(numbers.integers(0, 256, (count, 8, 8), np.uint8), numbers.integers(0, 10, count), prepare)

    def prepare(samples: NDArray[Any]) -> F32:
        return samples[:, None].astype(np.float32) / np.float32(255)

    return Source(partial(part, SAMPLES), partial(part, 100), classes=10, shape=(1, 8, 8))


def plan_of(case: Case, clients: int, rounds: int) -> Plan:
    settings = [
        "task.data='stacked:noise'",
        f"federation.clients={clients}",
        f"federation.batch={EACH}",
        "probe.k=20",
        f"probe.distribution={case.directions}",
        f"probe.stacked={str(case.stacked).lower()}",
        f"secure.mode='{case.secure}'",
        f"run.runtime={case.runtime}",
        "run.workers=1",
        "run.evaluate_every=1000000",
        f"rounds={rounds}",
    ]
    return load("digits", settings)


def cpu_seconds(plan: Plan) -> float:
    """The CPU time of a whole run."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        simulate(plan, Path(folder) / "run")
        return time.process_time() - began


def measured(case: Case, clients: int, rounds: int, turns: int) -> dict[str, Any]:
    least = dict[int, float]()
    if case.secure == "on" or not case.stacked:
        rounds, turns = 1, 1
    cpu_seconds(plan_of(case, 10, 1))  # libraries are loaded and warm
    for _ in range(turns):
        for length in (1, 1 + rounds):
            took = cpu_seconds(plan_of(case, clients, length))
            least[length] = min(took, least.get(length, took))
    seconds = (least[1 + rounds] - least[1]) / rounds
    return {"clients": clients, **case._asdict(), "cpu_seconds": round(seconds, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of cases")
    parser.add_argument("--out", type=Path, help="a file that keeps the rows")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    rows: list[dict[str, Any]] = []
    if arguments.out and arguments.out.exists():
        rows = json.loads(arguments.out.read_text())["rows"]
    about = {"rounds": arguments.rounds, "turns": arguments.turns}
    for number, case in enumerate(CASES):
        known = any(case._asdict().items() <= row.items() for row in rows)
        if known or number not in (arguments.only or range(len(CASES))):
            continue
        row = measured(case, arguments.clients, arguments.rounds, arguments.turns)
        rows.append({**row, "load": round(os.getloadavg()[0], 2)})
        if arguments.out:
            arguments.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
        if not arguments.json:
            line = "{clients:5} clients, {runtime:5} secure {secure:3} stacked {stacked!s:5} {directions:10}"
            print(line.format(**row), f"{row['cpu_seconds']:8.3f} CPU s a round", flush=True)
    if arguments.json:
        print(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
