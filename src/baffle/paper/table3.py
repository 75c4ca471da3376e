"""table3: clients of one domain each train a new last layer on a frozen MobileNetV2, on PACS and on OfficeHome."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from baffle.client.abstaining import Tell
from baffle.grid.spread import letters_of
from baffle.paper.target import (
    DRAWN,
    Cell,
    Finished,
    Result,
    Rows,
    Scale,
    Target,
    common_cells,
    range_of,
    row_of,
    spread_of,
)
from baffle.paper.training_runs import PRESET, Settings
from baffle.plan import Plan, load

KS = (20, 50, 100, 200, 500)
BACKPROPAGATION = "backpropagation"
EXACT = "exact head"

# On clients of one domain each, exact gradients may need a smaller rate than estimates, so they get both rates.
_ROWS: Mapping[str, Settings] = {
    **{f"K = {k}": (f"probe.k={k}",) for k in KS},
    BACKPROPAGATION: ("estimator=backprop",),
    f"{BACKPROPAGATION}, rate 0.001": ("estimator=backprop", "update.rate=0.001"),
    EXACT: ("probe.head=exact",),
    f"{EXACT}, rate 0.001": ("probe.head=exact", "update.rate=0.001"),
}
Pair = tuple[float, float]  # top-1 and top-5 accuracy, in percent

_DOMAINS = ("Art", "Clipart", "Product", "Real World", "average")
_FIGURES = {
    "K = 20": ((44.75, 69.46), (52.48, 73.88), (66.63, 89.77), (63.78, 87.83), (56.91, 80.24)),
    "K = 50": ((47.87, 71.32), (53.43, 76.83), (71.28, 91.74), (67.02, 89.95), (59.90, 82.46)),
    "K = 100": ((50.32, 74.42), (57.43, 80.73), (74.19, 93.02), (69.53, 90.43), (62.87, 84.65)),
    "K = 200": ((51.42, 76.64), (60.98, 86.41), (76.05, 94.42), (71.51, 93.14), (64.98, 87.65)),
    "K = 500": ((53.33, 77.85), (62.58, 86.64), (78.84, 95.23), (73.17, 93.85), (66.98, 88.40)),
    BACKPROPAGATION: ((55.71, 80.43), (65.13, 88.65), (82.44, 96.05), (77.19, 95.04), (70.12, 90.04)),
}

OFFICEHOME: Mapping[str, Mapping[str, Pair]] = {  # the paper's figures; an average is over the four domains
    name: dict(zip(_DOMAINS, figures, strict=True)) for name, figures in _FIGURES.items()
}

_FROZEN = ("federation.partition=domain", "federation.level=epoch", 'task.model={name="mobilenet"}')
_SMOKE = (
    *(*_FROZEN, "task.data=baffle.paper.looks:digits_in_four_looks", "task.model.weights=random"),
    *("federation.clients=8", "rounds=2", "run.evaluate_every=1"),
)
_PAPER = (*_FROZEN, "federation.clients=40", "rounds=40", "update.rate=0.005")


@dataclass(frozen=True)
class Domains(Target):
    """The same runs on one data set: accuracy on each of its domains, their mean, how far the mean is from the best one
    with backpropagation, and the loss that clients report in the last round. `compared` names the domains for which the
    paper's figures, which are for OfficeHome, stand beside ours."""

    settings: Settings
    compared: tuple[str, ...]

    def plans(self, scale: Scale) -> dict[str, Plan]:
        base = _SMOKE if scale == "smoke" else (*_PAPER, *self.settings)
        return {name: load(PRESET[scale], [*base, *settings]) for name, settings in _ROWS.items()}

    def result(self, rows: Rows, scale: Scale, _data: Path | None, _tell: Tell) -> Result:
        accuracies = {name: mean_pairs(runs) for name, runs in rows.items()}
        averages = [spread_of(runs, lambda run: pairs(run.summary)["average"][0]) for runs in rows.values()]
        exact = _exact(accuracies)
        cells: list[dict[str, Cell]] = [
            {
                "top-1 / top-5, %": name,
                **{domain: _both(pair) for domain, pair in accuracies[name].items()},
                "average: least – most": range_of(spread),
                "equal": equal or None,
                "points from backpropagation": (
                    f"{accuracies[name]['average'][0] - exact['average'][0]:+.2f}" if exact else None
                ),
                "clients' loss": spread_of(runs, lambda run: float(run.metrics[-1]["loss"])).mean,
                **{
                    f"the paper on OfficeHome: {domain}": (
                        _both(paper[domain]) if (paper := OFFICEHOME.get(row_of(name))) else None
                    )
                    for domain in self.compared
                },
                **common_cells(runs),
                "bytes up": round(float(runs[0].summary["uplink_bytes_per_client_round"])),
            }
            for (name, runs), spread, equal in zip(rows.items(), averages, letters_of(averages), strict=True)
        ]
        notes = [
            "Every domain counts the same in an average. The accuracy is that of the averaged weights. Points count "
            "from the better row of backpropagation. The clients' loss is that of the last round. Bytes up are those "
            "of a client in a round, its part in the secure sum included.",
            *(["On a few digits, with a random backbone, to see that it works."] if scale == "smoke" else []),
        ]
        return Result.of(cells, notes, {"accuracies": accuracies}, partial(_draw, accuracies))


def pairs(summary: Mapping[str, Any]) -> dict[str, Pair]:
    """Top-1 and top-5 accuracy for each domain, and their means as `average`."""
    domains = summary["test_domains"].items()
    by_domain = {name: (100 * domain["accuracy"], 100 * domain["top5"]) for name, domain in domains}
    top1, top5 = (sum(values) / len(by_domain) for values in zip(*by_domain.values(), strict=True))
    return {**by_domain, "average": (top1, top5)}


def mean_pairs(runs: Sequence[Finished]) -> dict[str, Pair]:
    """The same for all seeds of a row: their means."""
    seeds = [pairs(run.summary) for run in runs]
    return {domain: (fmean(s[domain][0] for s in seeds), fmean(s[domain][1] for s in seeds)) for domain in seeds[0]}


def _exact(accuracies: Mapping[str, Mapping[str, Pair]]) -> Mapping[str, Pair]:
    """The row of backpropagation with the best average, or an empty mapping if no such row was run."""
    rows = [by_domain for name, by_domain in accuracies.items() if name.startswith(BACKPROPAGATION)]
    return max(rows, key=lambda by_domain: by_domain["average"], default={})


def _both(pair: Pair) -> str:
    return f"{pair[0]:.2f} / {pair[1]:.2f}"


def _draw(accuracies: Mapping[str, Mapping[str, Pair]], figure: Any) -> None:
    """Top-1 accuracy against K, one line for each domain. Dashed lines show backpropagation."""
    axes = figure.subplots()
    exact = _exact(accuracies)
    estimated = [name for name in accuracies if name.startswith("K = ")]
    drawn = [name for name in estimated if name.endswith(DRAWN)]
    ks = {name: int(row_of(name).removeprefix("K = ")) for name in estimated}
    for number, domain in enumerate(next(iter(accuracies.values()))):
        color, width = f"C{number}", 2.5 if domain == "average" else 1
        for names, style, end in (([name for name in estimated if name not in drawn], "o-", ""), (drawn, "s-.", DRAWN)):
            top1 = [accuracies[name][domain][0] for name in names]
            if names or not end:
                axes.plot([ks[name] for name in names], top1, style, label=domain + end, color=color, linewidth=width)
        if exact:
            axes.axhline(exact[domain][0], linestyle="--", color=color, linewidth=width / 2)
    axes.set(xscale="log" if ks else "linear", xlabel="K (dashed: backpropagation)", ylabel="top-1 accuracy, %")
    axes.legend(frameon=False, fontsize=8)


TARGET = Domains(
    "table3",
    "clients of one domain each: a frozen MobileNetV2, 40 clients, one local epoch a round",
    settings=("task.data=pacs",),
    compared=("average",),
)

TARGET_OFFICEHOME = Domains(
    "table3-officehome",
    "the same as table3, on the paper's own data where it is not a smoke test",
    settings=("task.data=officehome", "task.pixels=224"),
    compared=_DOMAINS,
)
