"""The course of a run in few enough points to draw: what was measured, against rounds, forward passes, bytes and
seconds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baffle.client.worker import forwards_of
from baffle.core.ports import CONTRIBUTED
from baffle.report.record import RunRecord, number
from baffle.schedule import tiers_of
from baffle.trajectory import trajectory_of

MOST_POINTS = 150
"""A line has about this many points at most."""

AXES = {
    "rounds": "rounds",
    "forwards": "forward passes of all clients",
    "bytes": "bytes up and down, all clients",
    "seconds": "seconds",
}
"""What a line can be drawn against."""

Column = list[float | None]


@dataclass(frozen=True)
class Series:
    """Columns of equal length, by name: those of AXES, `loss`, `epsilon` and each metric's. A point's loss is the mean
    over the `step` rounds up to it. A column may be missing."""

    columns: dict[str, Column]
    step: int


def series_of(run: RunRecord) -> Series:
    done = [metrics.round + 1 for metrics in run.rounds]
    step = stride(len(done), MOST_POINTS)
    kept = _kept(done, step, [place for place, record in enumerate(run.metrics) if _is_evaluated(record)])
    traffic = np.cumsum([m.uplink_bytes + m.downlink_bytes + m.join_bytes for m in run.rounds])
    forwards = _forwards(run)
    columns: dict[str, Column] = {
        "rounds": [done[place] for place in kept],
        "bytes": [int(traffic[place]) for place in kept],
        "seconds": [round(run.rounds[place].seconds, 2) for place in kept],
        "loss": [_mean_loss(run, place, step) for place in kept],
    }
    if run.plan.privacy.on:
        columns["epsilon"] = [_short(number(run.rounds[place].epsilon)) for place in kept]
    if forwards is not None:
        columns["forwards"] = [int(forwards[place]) for place in kept]
    for metric in run.test_metrics:
        for name in (metric, f"{metric}_last"):
            values = [_short(number(run.metrics[place].get(name))) for place in kept]
            if any(value is not None for value in values):
                columns[name] = values
    return Series(columns, step)


def stride(length: int, most: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, … by which `length` things become at most `most`."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power * most >= length:
                return digit * power
        power *= 10


def _kept(done: Sequence[int], step: int, evaluated: Sequence[int]) -> list[int]:
    """The places of the rounds to draw: every whole multiple of `step`, the last one, and where something was measured,
    if that was not too often."""
    places = {place for place, rounds in enumerate(done) if rounds % step == 0}
    often = stride(len(evaluated), MOST_POINTS)
    return sorted(places | set(evaluated[often - 1 :: often]) | ({len(done) - 1} if done else set()))


def _is_evaluated(record: object) -> bool:
    return isinstance(record, dict) and any(name.startswith("test_") for name in record)


def _mean_loss(run: RunRecord, place: int, step: int) -> float | None:
    losses = [number(metrics.loss) for metrics in run.rounds[max(0, place + 1 - step) : place + 1]]
    known = [loss for loss in losses if loss is not None]
    return _short(math.fsum(known) / len(known)) if known else None


def _short(value: float | None) -> float | None:
    """Enough digits to draw and to read."""
    return None if value is None else float(f"{value:.5g}")


def _forwards(run: RunRecord) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
    """Forward passes of all clients up to each round. If clients differ in what a round takes, a finished run's total
    is spread over the contributions; while it goes on, nobody knows."""
    contributed = np.cumsum([run.attendance.by_round.get(m.round, {}).get(CONTRIBUTED, 0) for m in run.rounds])
    plan = run.plan
    if not run.n_weights or not len(contributed):
        return None
    total = number(run.summary.get("forwards"))
    if total is not None and contributed[-1]:
        return np.asarray(np.rint(contributed * (total / contributed[-1])), dtype=np.float64)
    alike = plan.federation.level == "batch" and not plan.federation.tiers
    if not alike and not plan.federation.steps:
        return None
    ks = tiers_of(plan)
    each = forwards_of(trajectory_of(plan, run.n_weights), ks[0], plan.ring.n_max)
    return np.asarray(contributed * float(each), dtype=np.float64) if len(set(ks)) == 1 else None
