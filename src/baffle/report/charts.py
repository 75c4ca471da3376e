"""The charts of a report as data, without colours: the page's script draws them, and lists the same numbers as tables.

lines     a column of the runs' series against an axis that the reader chooses
bars      groups of bars, stacked or side by side
heat      a number for each row and column

A series is the course of a run in few enough points to draw.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from baffle.client.worker import forwards_of
from baffle.core.ports import CONTRIBUTED, MISSING
from baffle.data.partition import Holding, holdings, share_out
from baffle.data.sources import source_of
from baffle.errors import BaffleError, one_line
from baffle.report.record import LEFT_OUT, RunRecord, number
from baffle.report.words import is_share, metric_name, round_number
from baffle.schedule import tiers_of
from baffle.trajectory import trajectory_of

Chart = dict[str, Any]
Column = list[float | None]

MOST_BARS = 60  # in a chart; in longer runs, several rounds are counted together
MOST_ROWS = 40  # clients in a chart, chosen at even steps from the smallest to the largest
DOTTED = ", with averaged weights; dotted: without."
MOST_POINTS = 150  # about as many points as a line has at most

WAYS = {CONTRIBUTED: "contributed", LEFT_OUT: "left out", MISSING: "no answer"}  # in the order of the bars
AXES = {  # that the reader can choose
    **{"rounds": "rounds", "forwards": "forward passes of all clients"},
    **{"bytes": "bytes up and down, all clients", "seconds": "seconds"},
}


@dataclass(frozen=True)
class Series:
    """Columns of equal length by name: those of AXES, `loss`, `epsilon` and the metrics. A point's loss is the mean
    over the `step` rounds up to it. Columns may be missing."""

    columns: dict[str, Column]
    step: int


def series_of(run: RunRecord) -> Series:
    """Draws multiples of `step`, the last round, and evaluations unless they are many."""
    done = [metrics.round + 1 for metrics in run.rounds]
    step = round_number(len(done) / MOST_POINTS)
    evaluated = [i for i, record in enumerate(run.metrics) if any(name.startswith("test_") for name in record)]
    often = round_number(len(evaluated) / MOST_POINTS)
    places = {place for place, rounds in enumerate(done) if rounds % step == 0} | {*evaluated[often - 1 :: often]}
    kept = sorted(places | ({len(done) - 1} if done else set()))
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


def _mean_loss(run: RunRecord, place: int, step: int) -> float | None:
    losses = [number(metrics.loss) for metrics in run.rounds[max(0, place + 1 - step) : place + 1]]
    known = [loss for loss in losses if loss is not None]
    return _short(math.fsum(known) / len(known)) if known else None


def _short(value: float | None) -> float | None:
    """Enough digits to draw and to read."""
    return None if value is None else float(f"{value:.5g}")


def _forwards(run: RunRecord) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
    """Forward passes of all clients up to each round. If clients differ, a finished run's total is spread over the
    contributions; while such a run goes on, the number is unknown."""
    plan = run.plan
    first, steps = plan.federation.warm_up, plan.federation.local_steps
    contributed = np.cumsum(
        [
            run.attendance.by_round.get(m.round, {}).get(CONTRIBUTED, 0) * (1 if m.round < first else steps)
            for m in run.rounds
        ]
    )
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
    return np.asarray(contributed * (each / steps), dtype=np.float64) if len(set(ks)) == 1 else None


def lines_data(runs: Sequence[RunRecord], names: Sequence[str]) -> list[dict[str, Any]]:
    """The lines to draw: each run, and its baseline if there is one."""
    lines = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        lines.append({"run": place, "name": name, "dash": False, **series_of(run).columns})
        if run.baseline and run.baseline.rounds:
            columns = series_of(run.baseline).columns
            lines.append({"run": place, "name": beside(name, runs), "dash": True, **columns})
    return lines


def line_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """The most important metric first, then the loss, then other metrics."""
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.test_metrics))
    step = max((series_of(run).step for run in runs), default=1)
    loss = "training loss" if step == 1 else f"training loss, mean of up to {step} rounds"
    about = "Mean loss of the clients of a round on their own samples, before its step."
    charts = [_lines("loss", loss, about)] if not all(run.plan.privacy.on and not run.baseline for run in runs) else []
    if any(run.plan.privacy.on for run in runs):
        charts.append(_lines("epsilon", "privacy: ε", "What the rounds so far cost a client that took part in each."))
    averaged = {metric for run in runs for metric in run.test_metrics if run.is_averaged(metric)}
    named = [
        _lines(metric, metric_name(metric), f"On the test set{DOTTED if metric in averaged else '.'}")
        for metric in metrics
    ]
    return named[:1] + charts + named[1:]


def _lines(column: str, title: str, about: str) -> Chart:
    chart = {"id": f"chart-{column}", "kind": "lines", "column": column, "title": title}
    return chart | {"percent": is_share(column), "about": about}


def bytes_chart(runs: Sequence[RunRecord], names: Sequence[str]) -> Chart | None:
    """Bytes of a client in a round, up and down, compared with sending all weights."""
    groups = list[tuple[str, float, float]]()
    for run, name in zip(runs, names, strict=True):
        for label, record in ((name, run), (beside(name, runs), run.baseline)):
            if record and record.rounds:
                groups.append((label, *traffic_of(record)))
    for weights in dict.fromkeys(run.n_weights for run in runs if run.rounds):
        label = "sending weights" if len({run.n_weights for run in runs}) == 1 else f"sending {weights:,} weights"
        groups.append((label, 4 * weights, 4 * weights))
    if not groups:
        return None
    labels, up, down = (list(column) for column in zip(*groups, strict=True))
    chart = {"id": "chart-bytes", "kind": "bars", "title": "bytes per client and round", "horizontal": True}
    return chart | {
        **{"groups": labels, "group": "what is sent"},
        "bars": [{"name": "up", "values": up}, {"name": "down", "values": down}],
        "about": "Sending weights: four bytes for each weight, up and down, computed. The rest is measured.",
    }


def beside(name: str, runs: Sequence[RunRecord]) -> str:
    """The name of a run's baseline."""
    return "backpropagation" if len(runs) == 1 else f"{name}, backpropagation"


def traffic_of(run: RunRecord) -> tuple[float, float]:
    """Mean bytes that a client sent and received in a round."""
    replies = sum(metrics.replies for metrics in run.rounds)
    asked = sum(metrics.requests + metrics.joins for metrics in run.rounds)
    up = sum(metrics.uplink_bytes for metrics in run.rounds)
    down = sum(metrics.downlink_bytes + metrics.join_bytes for metrics in run.rounds)
    return round(up / max(1, replies), 1), round(down / max(1, asked), 1)


def attendance_chart(run: RunRecord, place: int) -> Chart | None:
    """How clients ended the rounds. In a long run, several rounds are counted together."""
    if not run.rounds:
        return None
    step = round_number(run.rounds_done / MOST_BARS)
    counts: dict[int, Counter[str]] = {}
    for played, ways in run.attendance.by_round.items():
        counts.setdefault(played // step, Counter()).update(ways)
    ends = {first * step: min((first + 1) * step, run.rounds_done) for first in sorted(counts)}
    bars = [
        {"name": label, "way": way}
        | {"values": [round(counts[start // step][way] / max(1, end - start), 2) for start, end in ends.items()]}
        for way, label in WAYS.items()
    ]
    rounds = "in each round" if step == 1 else f"in a round, mean of {step} rounds"
    return {
        **{"id": f"chart-attendance-{place}", "kind": "bars", "title": f"clients {rounds}", "stacked": True},
        "groups": [f"{start + 1}" if step == 1 else f"{start + 1}–{end}" for start, end in ends.items()],
        "group": "rounds",
        "bars": [bar for bar in bars if any(bar["values"])],
        "about": "Left out: the client answered, but is not in the sum.",
    }


@dataclass(frozen=True)
class Partition:
    """Each client's holding, or the reason why it is unknown."""

    holdings: tuple[Holding, ...]
    missing: str = ""


def partition_of(run: RunRecord, data: Path | None = None, *, own_code: bool = False) -> Partition:
    """The partition of a run. A user's function is only called with `own_code`, since the folder may be untrusted."""
    plan = run.plan
    if run.networked:
        return Partition((), "The server of a networked run does not know it: each client has its own samples.")
    if run.given:
        return Partition((), "A program gave the data as objects (baffle.fit); the run's folder does not hold them.")
    if ":" in plan.task.data and not own_code:
        return Partition((), f"The plan's data come from {plan.task.data}, which is not run without --own-code.")
    try:
        source = source_of(plan.task, data)
        return Partition(tuple(holdings(source, share_out(plan, source))))
    except BaffleError as fault:
        return Partition((), f"The data cannot be read here: {one_line(str(fault))}.")


def partition_chart(partition: Partition, place: int) -> Chart | None:
    """How many samples of each class the clients hold."""
    rows, part = partition.holdings, ""
    if not rows or not rows[0].classes:
        return None
    if len(rows) > MOST_ROWS:
        ranked = sorted(rows, key=lambda holding: holding.samples)
        part = f", {MOST_ROWS} of {len(rows):,} by size"
        rows = tuple(ranked[place] for place in np.linspace(0, len(ranked) - 1, MOST_ROWS).astype(int))
    return {
        **{"id": f"chart-partition-{place}", "kind": "heat", "title": f"samples of each class{part}"},
        **{"rows": [f"{holding.client}" for holding in rows], "row": "client"},
        **{"columns": [str(label) for label in range(len(rows[0].classes))], "column": "class"},
        "values": [holding.classes for holding in rows],
        "scale": "samples",
        "about": "The stronger the colour, the more samples.",
    }
