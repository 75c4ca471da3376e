"""CPU seconds, scalars and bytes until a LeNet knows MNIST: dense directions, stages, units, and backpropagation.

    BAFFLE_DATA=... python benchmarks/time_to_accuracy.py --out results/time_to_accuracy.json

The paper's LeNet (26,730 weights), one client with 8 samples a round, plain sums, Adam, one thread: this measures the
price of probes. Units lose some of their lead when the same samples are spread over more clients. The clock counts the
CPU time of rounds, client and server together, but not that of measuring the accuracy (of the averaged weights on the
first 2,000 test images). The modes were not tuned equally: several batches, Ks and rates were tried for units, two
rates at one K for dense directions, and nothing for stages and backpropagation. A mode ends when it reaches 90 %, or at
its limit, and then it is reported as "more than". For dense directions and stages the limit is eight times what units
took to 85 %. Results are written after each mode, and a mode that is in the file is not run again, so that a long run
can be continued.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from baffle.client.client import Client
from baffle.client.replica import Replica
from baffle.client.worker import Worker
from baffle.journal.store import Journal
from baffle.lineage import Lineage
from baffle.plan import Plan, change, load
from baffle.runtime.torch.loss import accuracy, one_thread_each
from baffle.server.downlink import Downlink
from baffle.server.round import play_round
from baffle.simulation import aggregation
from baffle.task.load import Runtimes, Task, load_task, versions
from baffle.trajectory import trajectory_of
from baffle.transport.local import LocalTransport

COMMON = [
    *("federation.clients=1", "federation.batch=8", "federation.level=batch", "secure.mode=off", "rounds=100000"),
    *("probe.sigma=1e-3", "probe.distribution=rademacher", "update.clip=0.3", "update.ema=0.98", "run.workers=1"),
]
MODES = {
    "units": ["probe.supports=units", "probe.k=1600", "update.rate=0.02"],
    "backpropagation": ["estimator=backprop", "update.rate=0.01"],
    "stages": ["probe.supports=stages", "probe.k=200", "update.rate=0.01"],
    "dense": ["probe.k=20", "update.rate=0.01"],
}
GOALS = (0.85, 0.90)
LIMITED, TIMES = ("stages", "dense"), 8
TESTED = 2000


def plan_of(mode: str, settings: list[str]) -> Plan:
    return change(load("paper-mnist-lenet"), [*COMMON, *MODES[mode], *settings])


def measure(task: Task, limit: float, every: int) -> dict[str, Any]:
    """One mode: rounds until the last goal or the limit of CPU seconds."""
    plan, initial = task.plan, task.initial_weights()
    trajectory, spent, curve = trajectory_of(plan, len(initial)), 0.0, list[tuple[int, float, float]]()
    lineage = Lineage(trajectory)
    present = lineage.beginning(trajectory.rule.start(initial))
    runtimes, replica = Runtimes(task, 1), Replica(lineage, present)
    sums, sessions = aggregation(trajectory, task)
    clients = [
        Client(replica, Worker(number, k, trajectory, task.source.train, share, runtimes.borrow), sessions.get(number))
        for number, (k, share) in enumerate(zip(task.tiers, task.shares, strict=True))
    ]
    test = task.source.test.batch(np.arange(TESTED))
    reached: dict[float, tuple[float, int]] = {}
    uplink = list[int]()
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal.create(Path(folder) / "journal.sqlite", plan, present.state, versions(task.model)) as journal,
        LocalTransport(lambda number, data: clients[number].answer(data), 1) as transport,
    ):
        downlink = Downlink(plan.run.downlink, journal, lineage)
        while present.round < plan.rounds and spent < limit and len(reached) < len(GOALS):
            began = time.process_time()
            played = play_round(trajectory, present, transport, sums, journal, downlink)
            spent += time.process_time() - began
            present = played.present
            uplink.append(played.metrics["uplink_bytes"] // len(clients))
            if present.round % every:
                continue
            with runtimes.borrow() as runtime:
                measured = accuracy(runtime, trajectory.rule.smooth_weights(present.state), test)
            curve.append((present.round, round(spent, 1), round(measured, 4)))
            print(
                f"{plan.probe.supports:8} round {present.round}  {measured:.1%}  {spent:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            for goal in GOALS:
                if measured >= goal and goal not in reached:
                    reached[goal] = spent, present.round
    scalars = trajectory.length if plan.outcome_kind == "scalars" else 0
    row: dict[str, Any] = {"n_weights": trajectory.n, "scalars_per_round": scalars, "rounds": present.round}
    row |= {"uplink_bytes_per_round": int(np.median(uplink)), "cpu_seconds": round(spent, 1)}
    row |= {"cpu_seconds_per_round": round(spent / present.round, 4)}
    row |= {"best_accuracy": max(measured for _, _, measured in curve)}
    for goal in GOALS:
        seconds, rounds = reached.get(goal, (None, None))
        row |= {f"cpu_seconds_to_{goal:.0%}"[:-1]: seconds and round(seconds, 1)}
        row |= {f"rounds_to_{goal:.0%}"[:-1]: rounds, f"scalars_to_{goal:.0%}"[:-1]: rounds and rounds * scalars}
    return row | {"trajectory_digest": trajectory.digest.hex(), "curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", metavar="mode", help=f"of {', '.join(MODES)} (default: all)")
    parser.add_argument("--out", type=Path, help="write results here, and continue from those that are already there")
    parser.add_argument("--limit", type=float, default=3600.0, help="the most CPU seconds that a mode may take")
    parser.add_argument("--every", type=int, default=5, help="rounds between two measurements of the accuracy")
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", help="a setting of the plan for all modes"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    with one_thread_each():
        for mode in args.modes or MODES:
            if mode in rows:
                continue
            units = rows.get("units", {}).get("cpu_seconds_to_85")
            limit = min(args.limit, TIMES * units) if units and mode in LIMITED else args.limit
            rows[mode] = measure(load_task(plan_of(mode, args.settings)), limit, args.every)
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1) + "\n")
    if args.json:
        print(
            json.dumps({mode: {k: v for k, v in row.items() if k != "curve"} for mode, row in rows.items()}, indent=2)
        )
        return
    for mode, row in rows.items():
        to = [f"{row[f'cpu_seconds_to_{g:.0%}'[:-1]] or 'more than ' + str(row['cpu_seconds'])} s" for g in GOALS]
        print(f"{mode:16} to 85 % {to[0]:>18}  to 90 % {to[1]:>18}  {row['uplink_bytes_per_round']:,} bytes up a round")


if __name__ == "__main__":
    main()
