"""Draws the figures of docs/performance.md from committed results.

python benchmarks/plot.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent.parent
COLOURS = {"units": "#0b6e4f", "stages": "#3f88c5", "dense": "#d1495b", "backpropagation": "#555555"}


def read(name: str) -> Any:
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def time_to_accuracy() -> None:
    """Accuracy against CPU seconds, on a logarithmic axis because the modes are so far apart."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for mode, row in read("time_to_accuracy").items():
        _, seconds, right = zip(*row["curve"], strict=True)
        axes.plot(seconds, [100 * one for one in right], label=mode, color=COLOURS[mode], linewidth=1.6)
    axes.axhline(85, color="#999999", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="CPU seconds, one thread", ylabel="test accuracy, %", ylim=(0, 100))
    axes.legend(frameon=False, loc="lower right")
    save(figure, "time-to-accuracy")


def scale() -> None:
    """Cost against K, weights, batch and clients, each with its line."""
    rows = read("scale")["lines"]
    figure, panels = plt.subplots(1, len(rows), figsize=(11, 2.8))
    for axes, row in zip(panels, rows, strict=True):
        x, y, slope = row["x"], row["cpu_ms"], row["ms_for_one_more"]
        start = sum(y) / len(y) - slope * sum(x) / len(x)
        axes.plot(x, [start + slope * one for one in x], color="#bbbbbb", linewidth=1)
        axes.plot(x, y, "o", color=COLOURS["units"], markersize=4)
        axes.set(xlabel=row["against"], title=f"{slope:.3g} ms for one more", ylim=(0, None))
        axes.title.set_fontsize(9)
    panels[0].set_ylabel("CPU ms")
    save(figure, "scale")


def save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(HERE / "docs" / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "baffle", "axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    time_to_accuracy()
    scale()


if __name__ == "__main__":
    main()
