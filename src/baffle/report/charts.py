"""The charts of a report as data, without colours: the page's script draws them, and lists the same numbers as tables.

lines     a column of the runs' series against an axis that the reader chooses
bars      groups of bars, stacked or side by side
heat      a number for each row and column
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from baffle.core.ports import CONTRIBUTED, MISSING
from baffle.report.attendance import LEFT_OUT
from baffle.report.partition import Partition, shown
from baffle.report.record import RunRecord
from baffle.report.series import series_of, stride
from baffle.report.words import is_share, metric_name

Chart = dict[str, Any]

MOST_BARS = 60
"""Rounds are counted together, so that a chart has at most this many bars."""

WAYS = {CONTRIBUTED: "contributed", LEFT_OUT: "left out", MISSING: "no answer"}
"""How a client ends a round, in the order of the bars, and what people read."""


def lines_data(runs: Sequence[RunRecord], names: Sequence[str]) -> list[dict[str, Any]]:
    """What is drawn as lines: each run, and its baseline where there is one."""
    lines = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        lines.append({"run": place, "name": name, "dash": False, **series_of(run).columns})
        if run.baseline and run.baseline.rounds:
            label = "backpropagation" if len(runs) == 1 else f"{name}, backpropagation"
            lines.append({"run": place, "name": label, "dash": True, **series_of(run.baseline).columns})
    return lines


def line_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """The most important metric first, then the loss, then what else was measured."""
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.test_metrics))
    step = max((series_of(run).step for run in runs), default=1)
    loss = "training loss" if step == 1 else f"training loss, mean of up to {step} rounds"
    about = "Mean loss of the clients of a round on their own samples, before its step."
    charts = [_lines("loss", loss, about)] if not all(run.plan.privacy.on and not run.baseline for run in runs) else []
    if any(run.plan.privacy.on for run in runs):
        charts.append(_lines("epsilon", "privacy: ε", "What the rounds so far cost a client that took part in each."))
    averaged = {metric for run in runs for metric in run.test_metrics if run.is_averaged(metric)}
    named = [_lines(metric, metric_name(metric), _about(metric, averaged)) for metric in metrics]
    return named[:1] + charts + named[1:]


def _lines(column: str, title: str, about: str) -> Chart:
    return {
        "id": f"chart-{column}",
        "kind": "lines",
        "column": column,
        "title": title,
        "percent": is_share(column),
        "about": about,
    }


def _about(metric: str, averaged: set[str]) -> str:
    return "On the test set." if metric not in averaged else "On the test set, with averaged weights; dotted: without."


def bytes_chart(runs: Sequence[RunRecord], names: Sequence[str]) -> Chart | None:
    """Bytes of a client in a round, up and down, beside those of sending all weights."""
    groups, up, down = list[str](), list[float](), list[float]()
    for run, name in zip(runs, names, strict=True):
        beside = "backpropagation" if len(runs) == 1 else f"{name}, backpropagation"
        for label, record in ((name, run), (beside, run.baseline)):
            if record and record.rounds:
                traffic = traffic_of(record)
                groups.append(label)
                up.append(traffic[0])
                down.append(traffic[1])
    for weights in dict.fromkeys(run.n_weights for run in runs if run.rounds):
        groups.append("sending weights" if len({r.n_weights for r in runs}) == 1 else f"sending {weights:,} weights")
        up.append(4 * weights)
        down.append(4 * weights)
    if not groups:
        return None
    bars = [{"name": "up", "values": up}, {"name": "down", "values": down}]
    return {
        "id": "chart-bytes",
        "kind": "bars",
        "title": "bytes per client and round",
        "horizontal": True,
        "groups": groups,
        "group": "what is sent",
        "bars": bars,
        "about": "Sending weights: four bytes for each weight, up and down, computed. The rest is measured.",
    }


def traffic_of(run: RunRecord) -> tuple[float, float]:
    """Mean bytes that a client sent and received in a round."""
    replies = sum(metrics.replies for metrics in run.rounds)
    asked = sum(metrics.requests + metrics.joins for metrics in run.rounds)
    up = sum(metrics.uplink_bytes for metrics in run.rounds)
    down = sum(metrics.downlink_bytes + metrics.join_bytes for metrics in run.rounds)
    return round(up / max(1, replies), 1), round(down / max(1, asked), 1)


def attendance_chart(run: RunRecord, place: int) -> Chart | None:
    """How clients ended the rounds, several rounds counted together in a long run."""
    if not run.rounds:
        return None
    step = stride(run.rounds_done, MOST_BARS)
    counts: dict[int, Counter[str]] = {}
    for number, ways in run.attendance.by_round.items():
        counts.setdefault(number // step, Counter()).update(ways)
    bins = sorted(counts)
    groups = [
        f"{b * step + 1}" if step == 1 else f"{b * step + 1}–{min((b + 1) * step, run.rounds_done)}" for b in bins
    ]
    sizes = [min((b + 1) * step, run.rounds_done) - b * step for b in bins]
    bars = [
        {"name": label, "way": way, "values": [round(counts[b][way] / n, 2) for b, n in zip(bins, sizes, strict=True)]}
        for way, label in WAYS.items()
    ]
    rounds = "in each round" if step == 1 else f"in a round, mean of {step} rounds"
    return {
        "id": f"chart-attendance-{place}",
        "kind": "bars",
        "title": f"clients {rounds}",
        "stacked": True,
        "groups": groups,
        "group": "rounds",
        "bars": [bar for bar in bars if any(bar["values"])],
        "about": "Left out: the client answered, but is not in the sum.",
    }


def partition_chart(partition: Partition, place: int) -> Chart | None:
    """Which client holds how much of which class."""
    if not partition.holdings or not partition.holdings[0].classes:
        return None
    rows = shown(partition)
    part = "" if len(rows) == len(partition.holdings) else f", {len(rows)} of {len(partition.holdings):,} by size"
    return {
        "id": f"chart-partition-{place}",
        "kind": "heat",
        "title": f"samples of each class{part}",
        "rows": [f"{holding.client}" for holding in rows],
        "row": "client",
        "columns": [str(label) for label in range(len(rows[0].classes))],
        "column": "class",
        "values": [holding.classes for holding in rows],
        "about": "The stronger the colour, the more samples.",
    }
