"""ONNX Runtime against PyTorch: the CPU time of a simulated round.

    python benchmarks/runtimes.py            # a table
    python benchmarks/runtimes.py --json     # ... and write results/runtimes.json

Each row is one plan, simulated on both runtimes in turns of a few rounds, in one process on one thread. The rounds are
whole: directions, forward passes, secure sum, step and journal. The CPU time of a round is that of the least turn, so
that other work on the machine, which can only add to it, counts least.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baffle import Dataset, Source
from baffle.core.arrays import F32
from baffle.core.ports import Batch
from baffle.plan import Plan, load
from baffle.simulation import simulate
from baffle.task.load import load_task

RESULTS = Path(__file__).parents[1] / "results" / "runtimes.json"
RUNTIMES = ("onnx", "torch")

DEMO = ("digits",)
PAPER = ("digits", "task.model={name='lenet'}", "task.data='runtimes:noise'")
"""The paper's LeNet has 26,730 weights, and takes images of 32 × 32 pixels. What they show does not matter here."""

CASES = [
    (name, plan, batch)
    for name, plan in (("the demo's LeNet", DEMO), ("the paper's LeNet", PAPER))
    for batch in (8, 32)
]


def noise(data: Path | None) -> Source:  # noqa: ARG001
    """As many samples as digits has, of 32 × 32 pixels."""

    def part(count: int) -> Dataset:
        numbers = np.random.default_rng(count)
        return Dataset(numbers.integers(0, 256, (count, 32, 32), np.uint8), numbers.integers(0, 10, count), prepare)

    def prepare(samples: NDArray[Any]) -> F32:
        return samples[:, None].astype(np.float32) / np.float32(255)

    return Source(partial(part, 1438), partial(part, 359), classes=10, shape=(1, 32, 32))


def plan_of(plan: tuple[str, ...], batch: int, runtime: str, *more: str) -> Plan:
    name, *settings = plan
    fixed = (f"federation.batch={batch}", f"run.runtime={runtime}", "run.workers=1", "probe.k=20")
    return load(name, [*settings, *fixed, "run.evaluate_every=1000000", *more])


def losses_apart(plan: tuple[str, ...], batch: int) -> float:
    """How far the two runtimes' losses are apart at the initial weights, which are the same."""
    tasks = [load_task(plan_of(plan, batch, runtime)) for runtime in RUNTIMES]
    weights = [task.initial_weights() for task in tasks]
    assert (weights[0] == weights[1]).all()
    samples: Batch = tasks[0].source.train.batch(tasks[0].shares[0][:batch])
    one, other = (task.runtime().on(samples)(weights[0]) for task in tasks)
    return abs(one - other)


def cpu_seconds(plan: Plan) -> float:
    """The CPU time of a whole run."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        simulate(plan, Path(folder) / "run")
        return time.process_time() - began


def measured(name: str, plan: tuple[str, ...], batch: int, turns: int, rounds: int) -> dict[str, Any]:
    """One row. A turn's start and end take CPU time, too: turns of one round are subtracted from turns of `rounds`."""
    least: dict[tuple[str, int], float] = {}
    for _ in range(turns):
        for runtime in RUNTIMES:
            for length in (1, 1 + rounds):
                took = cpu_seconds(plan_of(plan, batch, runtime, f"rounds={length}"))
                least[runtime, length] = min(took, least.get((runtime, length), took))
    each = {runtime: 1000 * (least[runtime, 1 + rounds] - least[runtime, 1]) / rounds for runtime in RUNTIMES}
    return {
        "model": name,
        "batch": batch,
        "onnx_ms": round(each["onnx"], 1),
        "torch_ms": round(each["torch"], 1),
        "times": round(each["torch"] / each["onnx"], 2),
        "losses_apart": losses_apart(plan, batch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    rows = []
    for case in CASES:
        rows.append(measured(*case, arguments.turns, arguments.rounds))
        line = "{model:32} batch {batch:2}: {onnx_ms:7.1f} ms on ONNX Runtime, {torch_ms:7.1f} on PyTorch: {times:.2f}×"
        print(line.format(**rows[-1]), f"(losses {rows[-1]['losses_apart']:.1e} apart)", flush=True)
    if arguments.json:
        about = {"turns": arguments.turns, "rounds": arguments.rounds, "load": round(os.getloadavg()[0], 2)}
        RESULTS.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
