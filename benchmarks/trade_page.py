"""The tables and figures of results/decomfl.json and results/tradeoffs.json: DeComFL's logs beside our runs, and what
accuracy costs a client."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from decomfl import MARKS, SCALARS, SEEDS, WAYS
from matplotlib import pyplot as plt
from tradeoffs import ALLOWANCE, SEEDS as TRADE_SEEDS, WAYS as TRADED

RESULTS = Path(__file__).resolve().parent.parent / "results"
COLOURS = ("#d1495b", "#e09f3e", "#0b6e4f", "#8e6bbf", "#3f88c5", "#7f5539", "#999933", "#2a9d8f", "#555555")


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows(head: str, lines: Sequence[str]) -> str:
    return "\n".join([head, "|" + "---|" * (head.count("|") - 1), *lines])


def span(accuracies: Sequence[float]) -> str:
    """The mean, and of several seeds the least and the most."""
    few = f"{100 * fmean(accuracies):.1f} %"
    return f"{few} ({100 * min(accuracies):.1f}–{100 * max(accuracies):.1f})" if len(accuracies) > 1 else few


class Point(NamedTuple):
    """The accuracies of all seeds at a place of a curve."""

    passes: int
    scalars: int
    accuracies: tuple[float, ...]

    @property
    def words(self) -> str:
        return span(self.accuracies)


def curve_of(curves: Sequence[Sequence[Sequence[float]]]) -> list[Point]:
    """One curve from those of several seeds, which were all tested at the same places."""
    return [
        Point(int(places[0][0]), int(places[0][1]), tuple(place[2] for place in places))
        for places in zip(*curves, strict=True)
    ]


def logged() -> dict[str, list[Point]]:
    """DeComFL's curves. A round of several steps takes as many passes and scalars as that many rounds of one."""
    found, logs = dict[str, list[Point]](), read("decomfl_logs")
    for name, log in logs["logs"].items():
        passes, scalars = (log["steps"] * logs[f"{what}_a_step"] for what in ("passes", "scalars"))
        files = [[(n * passes, n * scalars, a) for n, a in file["accuracies"]] for file in log["files"]]
        found[name] = [point for point in curve_of(files) if point.passes <= MARKS[-1]]
    return found


def ours() -> dict[str, list[Point]]:
    runs = read("decomfl")["runs"]
    by_way = {way: [run for seed in SEEDS if (run := runs.get(f"{way}/{seed}"))] for way in WAYS}
    return {way: curve_of([run["curve"] for run in runs]) for way, runs in by_way.items() if runs}


def _at(points: Iterable[Point], what: str, mark: int) -> str:
    """The last point that spends no more than this, but for a part of a round, and at least half of it."""
    near = [point for point in points if mark / 2 <= getattr(point, what) <= 1.02 * mark]
    return near[-1].words if near else "–"


def decomfl() -> str:
    """Accuracies at equal passes and at equal scalars."""
    found = read("decomfl")
    lines = []
    for way, points in (logged() | ours()).items():
        run = found["runs"].get(f"{way}/{SEEDS[0]}")
        rate = f"{run['rate']:g}" if run else "0.001"
        cells = [_at(points, "passes", mark) for mark in MARKS] + [_at(points, "scalars", mark) for mark in SCALARS]
        lines.append(f"| {way} | {rate} | {' | '.join(cells)} | {len(points[0].accuracies)} |")
    marks = [f"{mark:,} passes" for mark in MARKS] + [f"{mark:,} scalars" for mark in SCALARS]
    return rows(f"| | rate | {' | '.join(marks)} | seeds |", lines)


def decomfl_checks() -> str:
    """How far accuracies are apart between scalars by a gradient and by real passes, after the first rounds."""
    lines = []
    for way, row in read("decomfl")["checks"].items():
        gradient, probes = (row[how]["curve"][-1] for how in ("gradient", "probes"))
        seconds = (row[how]["cpu_seconds"] for how in ("gradient", "probes"))
        lines.append(f"| {way} | {gradient[2]:.2%} | {probes[2]:.2%} | {' s | '.join(str(s) for s in seconds)} s |")
    return rows("| | by a gradient | by real passes | CPU: by a gradient | by real passes |", lines)


def draw_decomfl() -> Any:
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for axes, what in zip(panels, ("passes", "scalars"), strict=True):
        for number, (name, points) in enumerate((ours() | logged()).items()):
            theirs = name.startswith("DeComFL")
            x = [getattr(point, what) for point in points]
            style = {"color": "black", "linestyle": ":" if "ten" in name else "--"} if theirs else {}
            look = style or {"color": COLOURS[number]}
            axes.plot(x, [100 * fmean(point.accuracies) for point in points], label=name, linewidth=1.3, **look)
            low, high = ([100 * f(point.accuracies) for point in points] for f in (min, max))
            axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
        axes.set(xscale="log", xlabel=f"{what} of a client", ylim=(60, 100))
    panels[0].set_ylabel("test accuracy, %")
    panels[1].legend(frameon=False, fontsize=7, loc="lower right")
    return figure


class Trade(NamedTuple):
    """A way to train: what a round costs a client, and the accuracies after some rounds."""

    costs: dict[str, float]
    rate: float
    curve: list[tuple[int, tuple[float, ...]]]

    def at(self, number: int) -> tuple[float, ...]:
        return next(accuracies for rounds, accuracies in self.curve if rounds == number)


def trades() -> dict[str, Trade]:
    found, all_of = read("tradeoffs"), dict[str, Trade]()
    for way in TRADED:
        runs = [run for seed in TRADE_SEEDS if (run := found["runs"].get(f"{way}/{seed}"))]
        if runs:
            curve = [
                (places[0][0], tuple(place[1] for place in places))
                for places in zip(*(run["curve"] for run in runs), strict=True)
            ]
            all_of[way] = Trade(found["costs"][way], runs[0]["rate"], curve)
    return all_of


def tradeoffs() -> str:
    """What a round costs, and the accuracy at the end and within the allowance of bytes."""
    lines = []
    for way, trade in trades().items():
        costs, allowed = trade.costs, ALLOWANCE // int(trade.costs["bytes"])
        within = [accuracies for rounds, accuracies in trade.curve if rounds <= allowed]
        rounds, last = trade.curve[-1]
        lines.append(
            f"| {way} | {trade.rate:g} | {costs['bytes']:,.0f} | {costs['passes']:,.0f} | "
            f"{1000 * costs['cpu_seconds']:.0f} ms | {costs['memory'] / 1e6:.1f} MB | {rounds} | {span(last)} | "
            f"{span(within[-1]) if within else '–'} | {len(last)} |"
        )
    head = (
        "| | rate | a round: bytes up | passes | CPU | memory | rounds | accuracy at the end | "
        f"with {ALLOWANCE:,} bytes up | seeds |"
    )
    return rows(head, lines)


def draw_tradeoffs() -> Any:
    """Accuracy against all that a client has spent."""
    kinds = {"bytes": "bytes up", "passes": "passes", "cpu_seconds": "CPU seconds", "memory": "peak memory, MB"}
    figure, panels = plt.subplots(1, len(kinds), figsize=(13, 3.6), sharey=True)
    for axes, (kind, label) in zip(panels, kinds.items(), strict=True):
        for colour, (way, trade) in zip(COLOURS, trades().items(), strict=False):
            y = [100 * fmean(accuracies) for _, accuracies in trade.curve]
            each = trade.costs[kind]
            if kind == "memory":
                axes.plot([each / 1e6], y[-1:], "o", color=colour, label=way)
            else:
                axes.plot([rounds * each for rounds, _ in trade.curve], y, color=colour, label=way, linewidth=1.3)
        axes.set(xscale="log", xlabel=f"{label} of a client", ylim=(60, 100))
    panels[0].set_ylabel("test accuracy, %")
    panels[0].legend(frameon=False, fontsize=6)
    return figure


def baseline() -> str:
    """In which round backpropagation passes the paper's figure, and where it ends with the authors' own defaults."""
    page, row = read("paper/table1-full"), "LeNet, MNIST: backpropagation"
    figures = dict(zip(page["columns"], next(each for each in page["rows"] if each[0] == row), strict=True))
    numbers, means, *_ = page["data"]["curves"][row]
    passed = next(number for number, mean in zip(numbers, means, strict=True) if mean > figures["paper, %"])
    runs = read("baseline")["runs"]
    places = [number for number, _ in next(iter(runs.values()))["curve"]]
    lines = [
        f"| {name} | {' | '.join(f'{accuracy:.1%}' for _, accuracy in run['curve'])} |" for name, run in runs.items()
    ]
    table = rows(f"| one client a round | {' | '.join(f'{number} rounds' for number in places)} |", lines)
    return f"Ours passes the paper's {figures['paper, %']} % in round {passed} of {figures['rounds']}.\n\n{table}"


FIGURES: dict[str, Callable[[], Any]] = {"decomfl": draw_decomfl, "tradeoffs": draw_tradeoffs}
"""Figures of the docs, by the results that they show."""
