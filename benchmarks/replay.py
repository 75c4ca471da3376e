"""What outer directions save where rounds are replayed: at the server, at a client that catches up, in an audit.

    python benchmarks/replay.py                 # about seven minutes
    python benchmarks/replay.py --json          # the same, as JSON
    python benchmarks/replay.py --rounds 50     # a shorter catch-up

CPU time, BLAS on one thread; dense (gaussian and rademacher) and outer directions take turns in one run.

Server: the gradient of one matrix, in nanoseconds for each of the n · K numbers of the directions; the quickest turn.
Catching up: a client's replica gets the outcomes of all missed rounds in one request and replays them: by the hashes
between them that the server names, and by outcomes alone. An audit checks the hash of every round. Both end with the
run's own hash. The last two are measured over fewer rounds. The parts of a round are measured one by one.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from baffle.client.replica import Replica
from baffle.core.directions import NUMBERS_AT_ONCE, Directions, dense, distribution_of
from baffle.core.freed_memory import keep_freed_memory
from baffle.core.messages import CatchUp, Group, Outcome, RoundRequest, encode
from baffle.core.outer import Shapes, places, size_of
from baffle.core.rebuild import gradient_from_scalars, rebuild
from baffle.core.ring import Ring
from baffle.core.seeds import Scratch, signs
from baffle.core.state import Present
from baffle.journal.replay import follow
from baffle.journal.store import Entry
from baffle.lineage import Lineage
from baffle.plan import Plan, change
from baffle.trajectory import Trajectory, trajectory_of

KEY, KINDS = bytes(range(32)), ("gaussian", "rademacher", "outer")
MATRIX: Shapes = ((384, 1536),)
MODEL: Shapes = ((1024, 784), (1024,), (192, 1024), (192,), (10, 192), (10,))
PLANS = {
    "adam, average": (),
    "sgd": ("update.optimizer=sgd", "update.ema=0"),
}
ROUNDS_A_TURN = 50
EVERY = 5
"""Every how many turns the ways beside the usual one are measured."""


def server(k: int, turns: int) -> dict[str, Any]:
    """One matrix, both kinds of directions in turns."""
    n, ring = size_of(MATRIX), Ring(clients=10, n_max=100, clip=50.0)
    totals = np.random.default_rng(0).integers(-(2**31), 2**31, k).astype(np.int32)
    kinds = {kind: Directions(KEY, distribution_of(kind, MATRIX)) for kind in KINDS}
    best, supports = dict.fromkeys(kinds, float("inf")), dense(n, k)
    for _ in range(turns):
        for kind, directions in kinds.items():
            began = time.process_time()
            found = gradient_from_scalars(totals, 1000, directions, supports, n, ring)
            best[kind] = min(best[kind], time.process_time() - began)
    exact = (rebuild(totals, kinds["outer"], supports, n) / (k * ring.scale * 1000)).astype(np.float32)
    nanoseconds = {kind: round(seconds / (n * k) * 1e9, 4) for kind, seconds in best.items()}
    return {
        "shape": MATRIX[0],
        "k": k,
        "cpu_ns_per_number": nanoseconds,
        "times": _times(nanoseconds),
        "exact": found.tobytes() == exact.tobytes(),
    }


def _times(spent: dict[str, float]) -> dict[str, float]:
    """How many times as long dense directions take."""
    return {kind: round(spent[kind] / spent["outer"], 1) for kind in KINDS if kind != "outer"}


class Run:
    """A run's past: the outcomes of its rounds, the hashes of its states, and where it stands."""

    def __init__(self, plan: Plan, rounds: int) -> None:
        n = size_of(MODEL)
        self.trajectory = trajectory_of(plan, n)
        self.lineage = Lineage(self.trajectory)
        weights = np.random.default_rng(1).standard_normal(n).astype(np.float32) * np.float32(0.03)
        self.beginning = self.lineage.beginning(self.trajectory.rule.start(weights))
        self.entries, self.digests = list[Entry](), list[bytes]()
        present = self.beginning
        for number in range(rounds):
            totals = np.random.default_rng(number).integers(-(2**20), 2**20, plan.probe.k).astype("<i4").tobytes()
            outcome = encode(Outcome(number, "scalars", (Group(number, totals, 30),)))
            present = self.lineage.advance(present, outcome)
            self.entries.append(Entry(number, outcome, present.chain))
            self.digests.append(present.state.digest())
        self.end = present

    def request(self, *, hashed: bool) -> RoundRequest:
        """What a client that missed all rounds is sent."""
        outcomes = [entry.outcome_bytes for entry in self.entries]
        pairs = [item for pair in zip(outcomes, self.digests, strict=True) for item in pair][:-1]
        items = CatchUp("hashed", 0, tuple(pairs)) if hashed else CatchUp("outcomes", 0, tuple(outcomes))
        present = self.end
        return RoundRequest(present.round, self.trajectory.digest, present.chain, present.state.weights_hash(), items)

    def catch_up(self, *, hashed: bool) -> float:
        """CPU seconds for a client to replay everything."""
        replica, request = Replica(self.lineage, self.beginning), self.request(hashed=hashed)
        began = time.process_time()
        replica.weights_for(request)
        spent = time.process_time() - began
        assert replica.chain == self.end.chain
        return spent

    def audit(self) -> float:
        """CPU seconds to follow the journal's entries."""
        present, began = self.beginning, time.process_time()
        for entry in self.entries:
            present = follow(self.lineage, present, entry)
        spent = time.process_time() - began
        assert present.chain == self.end.chain
        return spent


def parts_of(trajectory: Trajectory, present: Present, turns: int) -> dict[str, float]:
    """Milliseconds of CPU for the parts of one round, each the quickest of some turns."""
    plan, rule, state = trajectory.plan, trajectory.rule, present.state
    k, n = plan.probe.k, trajectory.n
    totals = np.random.default_rng(0).integers(-(2**20), 2**20, k).astype("<i4").tobytes()
    outcome = Outcome(0, "scalars", (Group(0, totals, 30),))
    directions, scratch = trajectory.directions(0), Scratch()

    def draw() -> None:
        if plan.probe.distribution == "outer":
            last = places(plan.probe.shapes)[-1]
            signs(directions.key, range(k), 0, last.number + last.rows + last.columns)
            return
        wide = NUMBERS_AT_ONCE // k
        for start in range(0, n, wide):
            directions.draw(range(k), start, min(start + wide, n), scratch)

    gradient = rule.gradient(outcome)
    works: dict[str, Callable[[], object]] = {
        "drawing": draw,
        "gradient": lambda: rule.gradient(outcome),
        "optimizer": lambda: state.weights + rule.optimizer.update(state.optimizer, gradient, state.weights)[1],
        "average": lambda: rule.average.update(state.average, gradient, state.weights),
        "hash": state.digest,
    }
    best = dict.fromkeys(works, float("inf"))
    for _ in range(turns):
        for name, work in works.items():
            began = time.process_time()
            work()
            best[name] = min(best[name], (time.process_time() - began) * 1e3)
    best["product"] = best["gradient"] - best["drawing"]
    return {name: round(best[name], 2) for name in ("drawing", "product", "optimizer", "average", "hash")}


def replays(name: str, settings: tuple[str, ...], k: int, rounds: int, turns: int) -> dict[str, Any]:
    """All rounds, in stretches that the two kinds take turns with."""
    stretch = min(rounds, ROUNDS_A_TURN)
    base = change(Plan(), [f"probe.k={k}", "ring.n_max=20", "run.workers=1", *settings])
    shapes = [list(shape) for shape in MODEL]
    plans = {kind: change(base, [f"probe.distribution={kind}"]) for kind in KINDS if kind != "outer"}
    plans["outer"] = change(base, ["probe.distribution=outer", f"probe.shapes={shapes}"])
    runs = {kind: Run(plan, stretch) for kind, plan in plans.items()}
    ways: dict[str, Callable[[Run], float]] = {
        "catch_up": lambda run: run.catch_up(hashed=True),
        "catch_up_by_outcomes": lambda run: run.catch_up(hashed=False),
        "audit": Run.audit,
    }
    seconds, measured = {way: dict.fromkeys(KINDS, 0.0) for way in ways}, dict.fromkeys(ways, 0)
    for turn in range(max(1, rounds // stretch)):
        for way, work in ways.items():
            if way != "catch_up" and turn % EVERY:
                continue
            measured[way] += stretch
            for kind in KINDS:
                seconds[way][kind] += work(runs[kind])
    a_round = {way: {kind: spent / measured[way] * 1e3 for kind, spent in by.items()} for way, by in seconds.items()}
    return {
        "plan": name,
        "weights": size_of(MODEL),
        "k": k,
        "rounds": measured,
        "cpu_ms_a_round": {way: {kind: round(ms, 2) for kind, ms in by.items()} for way, by in a_round.items()},
        "times": {way: _times(by) for way, by in a_round.items()},
        "parts_ms": {kind: parts_of(run.trajectory, run.end, turns) for kind, run in runs.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000, help="rounds that a client missed")
    parser.add_argument("--k", type=int, default=20, help="directions a round, in the catch-up")
    parser.add_argument("--turns", type=int, default=15, help="turns of which the quickest counts")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    keep_freed_memory()  # as clients and `baffle verify` do
    with threadpool_limits(limits=1, user_api="blas"):
        result: dict[str, Any] = {"server": server(100, args.turns), "replays": []}
        if not args.json:
            print(json.dumps(result["server"]))
        for name, settings in PLANS.items():
            row = replays(name, settings, args.k, args.rounds, args.turns)
            result["replays"].append(row)
            print(json.dumps(row) if not args.json else f"{name} is done", file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
