"""The tables and the figure of time to accuracy in docs/performance.md, from results/time_to_accuracy.json."""

import json
from collections.abc import Callable
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import pyplot as plt
from time_to_accuracy import GOALS, MODELS, MODES, SEEDS, SETS, chosen, settings_of

RESULTS = Path(__file__).resolve().parent.parent / "results" / "time_to_accuracy.json"
OLD = ("2026-11-17, bb2be55", ("85%", "90%"))
"""The code of rows that do not name it, and their goals. They ended when they had reached them."""

NAMES = {
    "lenet": "LeNet",
    "mlp": "MLP",
    "transformer": "transformer",
    "mnist": "MNIST",
    "usps": "USPS",
    "authors": "the authors' way",
}
COLOURS = {
    "outer": "#3f88c5",
    "units": "#0b6e4f",
    "layers": "#8e6bbf",
    "dense": "#d1495b",
    "authors": "#e09f3e",
    "backpropagation": "#555555",
}
"""Those of a mode without and, as dashed lines, with an exact head."""


def read() -> Any:
    return json.loads(RESULTS.read_text())


def rows(head: str, lines: list[str]) -> str:
    return "\n".join([head, "|" + "---|" * (head.count("|") - 1), *lines])


def runs_of(model: str, mode: str, data: str) -> list[dict[str, Any]]:
    """The runs that are there, one for each seed."""
    found = read()["runs"]
    names = [f"{model}/{mode}/{data}/{seed}" for seed in SEEDS]
    return [found[name] for name in names if name in found]


def accuracy(data: str) -> Callable[[], str]:
    """What it took on one data set: medians of the seeds, and the least and the most."""

    def table() -> str:
        lines = [_row(model, mode, runs) for model in MODELS for mode in MODES if (runs := runs_of(model, mode, data))]
        goals = [f"{what} to {goal:.0%}" for what in ("CPU s", "scalars") for goal in GOALS]
        head = f"| model | mode | clients, K, samples of each, rate | a scalar, CPU µs | {' | '.join(goals)} | code |"
        return rows(head.replace("%", " %"), lines)

    return table


def _row(model: str, mode: str, runs: list[dict[str, Any]]) -> str:
    seconds = " | ".join(_seconds(runs, f"{goal:.0%}") for goal in GOALS)
    scalars = " | ".join(_scalars(runs, f"{goal:.0%}") for goal in GOALS)
    price = (
        "–"
        if mode == "backpropagation"
        else f"{median(1e6 * run['cpu_seconds'] / run['scalars'] for run in runs):,.0f}"
    )
    about = f"{NAMES[model]} | {NAMES.get(mode, mode)} | {_setting(mode, runs[0])} | {price}"
    return f"| {about} | {seconds} | {scalars} | {runs[0].get('code', OLD[0])} |"


def _setting(mode: str, run: dict[str, Any]) -> str:
    size, rate = run["setting"].split("/")
    k, samples = size.split("x")
    return f"{run['clients']}, {'–' if mode == 'backpropagation' else k}, {samples}, {rate}"


def _seconds(runs: list[dict[str, Any]], goal: str) -> str:
    if any("code" not in run and goal not in OLD[1] and OLD[1][-1] in run["reached"] for run in runs):
        return "not run"
    spent = sorted(run["reached"].get(goal, {"cpu_seconds": inf})["cpu_seconds"] for run in runs)
    stopped = min((run["cpu_seconds"] for run in runs if goal not in run["reached"]), default=inf)

    def words(value: float) -> str:
        return f"{value:.{value < 10:d}f}" if isfinite(value) else f"more than {stopped:.0f}"

    if not isfinite(spent[0]):
        return f"{words(inf)} ({median(run['best_accuracy'] for run in runs):.0%})"
    return f"{words(median(spent))} ({words(spent[0])} to {words(spent[-1])})"


def _scalars(runs: list[dict[str, Any]], goal: str) -> str:
    sent = sorted(run["reached"][goal]["scalars"] / 1e6 if goal in run["reached"] else inf for run in runs)
    return f"{median(sent):.2f} M" if isfinite(median(sent)) else "–"


def trials() -> str:
    """The accuracy on held-out images at the end of each trial, a line for each size; the best is in bold."""
    lines = [line for model in MODELS for mode in MODES for line in _trials(model, mode)]
    return rows("| model | mode | K, samples of each client | at a small rate | a middle one | a large one |", lines)


def _trials(model: str, mode: str) -> list[str]:
    found, sizes = read()["trials"], dict[str, list[str]]()
    best = chosen(found, model, mode)
    for setting in settings_of(model, mode) if best else []:
        cell = f"{found[f'{model}/{mode}/{setting}']['accuracy']:.1%}"
        size = f"{'–' if mode == 'backpropagation' else setting.k}, {setting.batch}"
        sizes.setdefault(size, []).append(f"{setting.rate:g}: " + (f"**{cell}**" if setting == best else cell))
    return [
        f"| {NAMES[model]} | {NAMES.get(mode, mode)} | {size} | {' | '.join(cells)} |" for size, cells in sizes.items()
    ]


def draw_accuracy() -> Any:
    """Accuracy against CPU seconds, a panel for each model and data set, a line for each seed. The axis is logarithmic
    because the modes are so far apart."""
    figure, panels = plt.subplots(len(MODELS), len(SETS), figsize=(9, 3 * len(MODELS)), sharey=True, squeeze=False)
    for line, model in zip(panels, MODELS, strict=True):
        for axes, data in zip(line, SETS, strict=True):
            for mode in MODES:
                for seed, run in enumerate(runs_of(model, mode, data)):
                    seconds, accuracies = zip(*run["curve"], strict=True)
                    percent = [100 * found for found in accuracies]
                    kind, _, head = mode.partition(", ")
                    look = {"color": COLOURS[kind], "linestyle": "--" if head else "-"}
                    label = {"label": NAMES.get(mode, mode)} if seed == 0 else {}
                    axes.plot(seconds, percent, linewidth=1.1, **look, **label)
            for goal in GOALS:
                axes.axhline(100 * goal, color="#999999", linewidth=0.8, linestyle=":")
            axes.set(
                xscale="log", ylim=(0, 100), title=f"{NAMES[model]}, {NAMES[data]}", xlabel="CPU seconds, one thread"
            )
            axes.title.set_fontsize(9)
        line[0].set_ylabel("test accuracy, %")
    panels[0][0].legend(frameon=False, loc="upper left", fontsize=8)
    return figure
