"""How much harm one malicious client can do to an update: in one sum, and in groups that are combined by a median.

    python benchmarks/poisoning.py --json

A hundred clients probe the digits at the initial weights. For every direction, one of them opposes the sum of all the
others with the value that does the most harm: the largest that an honest client could send (`own range`), or the
largest that the checks on a sum let through (`sum's range`; masks hide single values, so only sums can be checked). The
figure is the cosine between the update's gradient and the one from the other 99 clients, the mean over several rounds.
Masks change no sum, so the sums are plain here.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baffle.client.client import Client
from baffle.client.replica import Replica
from baffle.client.worker import Worker
from baffle.core.arrays import F32
from baffle.core.messages import RoundRequest, contribution_to, encode
from baffle.core.ring import EXTRAS, Ring, RingVector, add
from baffle.core.state import Present
from baffle.journal.store import Journal
from baffle.lineage import Lineage
from baffle.plan import change, load
from baffle.runtime.torch.loss import one_thread_each
from baffle.schedule import choose_groups
from baffle.server.downlink import Downlink
from baffle.server.round import close_round, open_round
from baffle.task.load import Runtimes, load_task, versions
from baffle.trajectory import Trajectory, trajectory_of

ATTACKER = 0
SETTINGS = {
    "one sum": [],
    "20 groups, mean": ["secure.groups=20"],
    "20 groups, median": ["secure.groups=20", "secure.combine=median"],
    "20 groups of own seeds, median": ["secure.groups=20", "secure.combine=median", "secure.group_seeds=own"],
}


class Federation:
    """The clients of one setting, and what they send in a round."""

    def __init__(self, settings: Sequence[str], folder: Path) -> None:
        settings = ["federation.clients=100", "secure.mode=off", "probe.k=50", *settings]
        self.task = load_task(change(load("digits"), settings))
        initial = self.task.initial_weights()
        self.trajectory = trajectory_of(self.task.plan, len(initial))
        self.state = self.trajectory.rule.start(initial)
        self.journal = Journal.create(folder / "journal.sqlite", self.task.plan, self.state, versions(self.task.model))
        self.lineage = Lineage(self.trajectory)
        runtimes, replica = Runtimes(self.task, 1), Replica(self.lineage, self.lineage.beginning(self.state))
        self.clients = [
            Client(replica, Worker(number, k, self.trajectory, self.task.source.train, share, runtimes.borrow))
            for number, (k, share) in enumerate(zip(self.task.tiers, self.task.shares, strict=True))
        ]

    def vectors(self, number: int) -> list[dict[int, RingVector]]:
        """What each client of each group sends in a round about the initial weights."""
        present = Present(number, self.state, self.lineage.beginning(self.state).chain)
        groups = choose_groups(self.trajectory, number)
        requests = open_round(self.trajectory, present, groups, Downlink("weights", self.journal, self.lineage))
        return [{client: self._vector(client, request) for client, request in group.items()} for group in requests]

    def _vector(self, client: int, request: RoundRequest) -> RingVector:
        return contribution_to(request, self.clients[client].answer(encode(request)))


def poisoned(groups: list[dict[int, RingVector]], ring: Ring, bound: str) -> list[dict[int, RingVector]]:
    """The same groups, but one client sends the worst that the bound allows."""
    honest = [vector for group in groups for client, vector in group.items() if client != ATTACKER]
    against = -np.sign(add(honest)[:-EXTRAS].view(np.int32).astype(np.int64))
    group = next(group for group in groups if ATTACKER in group)
    others = add([v for client, v in group.items() if client != ATTACKER]).view(np.int32).astype(np.int64)
    if bound == "own range":
        values = against * int(ring.clip * ring.n_max * ring.scale)
    else:
        values = against * ring.most(len(group), int(others[-EXTRAS]) + ring.n_max) - others[:-EXTRAS]
    worst = group[ATTACKER].copy()
    worst[:-EXTRAS], worst[-EXTRAS] = values.astype(np.uint32), ring.n_max
    return [{**group, ATTACKER: worst} if ATTACKER in group else group for group in groups]


def gradient(trajectory: Trajectory, present: Present, groups: Sequence[Mapping[int, RingVector]]) -> F32:
    sums = [trajectory.ring.decode(add(group.values()), len(group)) for group in groups]
    return trajectory.rule.gradient(close_round(trajectory, present, sums))


def cosine(left: F32, right: F32) -> float:
    return float(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)))


def measure(settings: Sequence[str], rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(settings, Path(folder))
        trajectory, cosines = federation.trajectory, dict[str, list[float]]()
        ring = trajectory.ring
        assert isinstance(ring, Ring)  # the plan is not private
        for number in range(rounds):
            present, groups = Present(number, federation.state, b""), federation.vectors(number)
            honest = [{client: v for client, v in group.items() if client != ATTACKER} for group in groups]
            undisturbed = gradient(trajectory, present, honest)
            for bound in ("own range", "sum's range"):
                attacked = gradient(trajectory, present, poisoned(groups, ring, bound))
                cosines.setdefault(bound, []).append(cosine(attacked, undisturbed))
        federation.journal.close()
    return {bound: round(float(np.mean(values)), 3) for bound, values in cosines.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with one_thread_each():
        rows: dict[str, Any] = {name: measure(settings, args.rounds) for name, settings in SETTINGS.items()}
    if args.json:
        print(json.dumps({"clients": 100, "attackers": 1, "rounds": args.rounds, "cosine": rows}, indent=2))
        return
    for name, row in rows.items():
        print(f"{name:32}" + "".join(f"  {bound} {value:+.3f}" for bound, value in row.items()))


if __name__ == "__main__":
    main()
