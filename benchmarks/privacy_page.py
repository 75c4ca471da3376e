"""The tables and the figure of docs/privacy.md, from results/privacy.json and results/privacy_attacks.json."""

import json
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from privacy import EXPERIMENTS, summary
from privacy_attacks import BUDGETS, MODELS, label

from baffle.privacy.accounting import noise_for

RESULTS = Path(__file__).resolve().parent.parent / "results"
NAMES = {"probe": "forward passes", "ten steps": "forward passes, ten steps a round", "backprop": "backpropagation"}
TASKS = {"digits": "digits, 100 clients", "writers": "MNIST, 539 writers"}
COLOURS = {"probe": "#0b6e4f", "ten steps": "#e09f3e", "backprop": "#555555"}
ROUNDS = (20, 50, 100, 200, 500)
TARGETS = (8, 4, 2, 1)


def read(name: str) -> Any:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def rows(head: str, lines: list[str]) -> str:
    return "\n".join([head, "|" + "---|" * (head.count("|") - 1), *lines])


def needed_noise() -> str:
    """By the accountant itself, for vectors of 100 values that are clipped to 2¹⁸ steps of the ring."""
    lines = [
        f"| {target} | "
        + " | ".join(f"{noise_for(target, 1e-5, count, delta_2=2**18, dimension=100):.1f}" for count in ROUNDS)
        + " |"
        for target in TARGETS
    ]
    return rows(f"| ε | {' | '.join(f'{count} rounds' for count in ROUNDS)} |", lines)


def accuracy() -> str:
    """A line for each task and estimator, a column for each ε: the median, and the least and the most."""
    found = {(row["task"], row["estimator"], row["target"]): row for row in summary(read("privacy"))}
    lines = [
        f"| {TASKS[task]} | {name} | "
        + " | ".join(_accuracies(found.get((task, estimator, target))) for target in (0, *TARGETS))
        + " |"
        for task in EXPERIMENTS
        for estimator, name in NAMES.items()
        if any((task, estimator, target) in found for target in (0, *TARGETS))
    ]
    return rows(f"| task | by | no noise | {' | '.join(f'ε = {target}' for target in TARGETS)} |", lines)


def _accuracies(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"{row['median']:.1%} ({min(row['accuracies']):.1%} to {max(row['accuracies']):.1%})"


def choices() -> str:
    """What was chosen on the samples held out, and the noise that follows."""
    lines = [
        f"| {TASKS[row['task']]} | {NAMES[row['estimator']]} | {row['target'] or 'none'} | "
        f"{_or_dash(row['noise'], '.1f')} | {_or_dash(row['clip'], 'g')} | {row['rate']:g} |"
        for row in summary(read("privacy"))
    ]
    return rows("| task | by | ε | noise | clip | rate |", lines)


def _or_dash(value: float | None, form: str) -> str:
    return format(value, form) if value else "–"


def drawn_in() -> str:
    times = read("privacy")["noise, ms for 10,000 numbers"]
    return (
        f"Drawing 10,000 numbers took {min(times.values()):.1f} to {max(times.values()):.1f} ms at variances from 1 to "
        "2⁵⁰, on one of two shared cores."
    )


def attacks() -> str:
    """A line for each model and budget."""
    found, lines = read("privacy_attacks"), []
    for model in MODELS:
        for epsilon, count in BUDGETS:
            row = found.get(label(model, epsilon, count))
            if row is None:
                continue
            budget = f"{epsilon}, over {count} rounds" if count > 1 else f"{epsilon}, in one round"
            views = [_view(row[view]) for view in ("sum", "difference")]
            bound = f"{row['bound']:.2f}" if row["noise"] else "1"
            lines.append(f"| {model} | {budget if epsilon else 'none'} | {' | '.join(views)} | {bound} |")
    what = "membership / labels / input (by chance)"
    table = rows(f"| model | ε | sum of 16: {what} | difference of two runs: {what} | bound |", lines)
    errors = [_largest_error(found, view) for view in ("sum", "difference")]
    return f"{table}\n\nStandard errors are at most {errors[0]:.2f} for the sum and {errors[1]:.2f} for the difference."


def _largest_error(found: dict[str, Any], view: str) -> float:
    return max(float(error) for row in found.values() for error in row[f"{view}, standard errors"].values())


def _view(scores: dict[str, float]) -> str:
    shown = f"{scores['membership']:.2f} / {scores['labels']:.2f}"
    if "input" not in scores:
        return f"{shown} / –"
    return f"{shown} / {scores['input']:.2f} ({scores['input, by chance']:.2f})"


def draw_accuracy() -> Any:
    """Accuracy against ε, a panel for each task; the dashed lines are runs without noise."""
    found = summary(read("privacy"))
    tasks = [task for task in EXPERIMENTS if any(row["task"] == task and row["target"] for row in found)]
    figure, panels = plt.subplots(1, len(tasks), figsize=(3.6 * len(tasks), 3.2), squeeze=False)
    for axes, task in zip(panels[0], tasks, strict=True):
        for estimator, name in NAMES.items():
            mine = [row for row in found if (row["task"], row["estimator"]) == (task, estimator)]
            noised = sorted((row for row in mine if row["target"]), key=lambda row: float(row["target"]))
            if not noised:
                continue
            x = [row["target"] for row in noised]
            low, high = ([100 * pick(row["accuracies"]) for row in noised] for pick in (min, max))
            axes.fill_between(x, low, high, color=COLOURS[estimator], alpha=0.15, linewidth=0)
            axes.plot(x, [100 * row["median"] for row in noised], "o-", color=COLOURS[estimator], label=name)
            for row in mine:
                if not row["target"]:
                    axes.axhline(100 * row["median"], color=COLOURS[estimator], linewidth=0.8, linestyle="--")
        axes.set(title=TASKS[task], xlabel="ε of the whole run", xscale="log", ylabel="test accuracy, %")
        axes.set_xticks(TARGETS, [str(target) for target in TARGETS])
        axes.minorticks_off()
        axes.title.set_fontsize(9)
    panels[0][0].legend(frameon=False, loc="lower right")
    return figure
