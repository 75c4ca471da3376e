"""The table at the top of docs/paper.md: each claim of the paper, and whether the pages in results/paper bear it out.

A claim is a list of checks. A check compares figures of one page, so that no verdict is typed: it holds in some cases
out of so many. Rows that are not on a page yet are left out; a claim without any check has not been run.
"""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

PAPER = Path(__file__).resolve().parent.parent / "results" / "paper"
HOURS = PAPER.parent / "paper_hours.json"
FULL = "-full"
NOT_AT_LENGTH = {"table3-short": "not run on its data"} | dict.fromkeys(
    ("theorem2-short", "table4-short", "fig-attack-short"), "–"
)
"""What stands in the place of a verdict at the paper's length, where it is not a matter of length."""
HEAD = "| the paper's claim | shorter runs, or other data | at the paper's length | figures | seeds of a row |"


class Check(NamedTuple):
    """A comparison on a page: in how many cases the claim holds, its figures in words, and the seeds of its rows."""

    page: str
    holds: Sequence[bool]
    figures: str
    seeds: str = "1"


class Table:
    """The rows of a page by name and column."""

    def __init__(self, stem: str) -> None:
        path = PAPER / f"{stem}.json"
        self.stem, self.page = stem, json.loads(path.read_text()) if path.exists() else {"columns": [], "rows": []}
        self.rows = {row[0]: dict(zip(self.page["columns"], row, strict=True)) for row in self.page["rows"]}

    def figure(self, row: str, column: str = "accuracy, %") -> float:
        return float(str(self.rows[row][column]).split(" / ")[0].strip("%"))

    def seeds(self, *rows: str) -> str:
        """How many seeds these rows have: the fewest, and the most if they differ."""
        runs = self.page.get("runs") or self.rows
        counts = {sum(run == row or run.startswith(f"{row}, seed ") for run in runs) for row in rows}
        return " to ".join(str(count) for count in sorted({min(counts), max(counts)}))

    def alike(self, row: str, other: str) -> bool:
        """Whether the page says that the rows differ by no more than their seeds do."""
        letters, others = (set(str(self.rows[each].get("equal") or "")) for each in (row, other))
        return bool(letters & others)

    def rising(self, *names: str, column: str = "accuracy, %") -> list[Check]:
        """A check that each of these rows that are on the page has a larger figure than the one before it."""
        there = [name for name in names if name in self.rows]
        if len(there) < 2:
            return []
        figures = [self.figure(name, column) for name in there]
        holds = [a < b and not self.alike(x, y) for (x, a), (y, b) in pairwise(zip(there, figures, strict=True))]
        words = " → ".join(f"{figure:.1f} ({_short(name)})" for name, figure in zip(there, figures, strict=True))
        return [Check(self.stem, holds, words, self.seeds(*there))]


def _short(name: str) -> str:
    return name.removeprefix("LeNet, MNIST: ")


def _full(name: str) -> str:
    return f"LeNet, MNIST: {name}"


def more_directions() -> list[Check]:
    full = Table("table1-full")
    drawn = [_full(f"K = {k}, drawn") for k in (100, 200, 500)]
    return [
        *Table("table1-short").rising("K = 400", "K = 800", "K = 1600"),
        *Table("fig-k-short").rising(*(f"K = {k}, units" for k in (100, 400, 1600))),
        *full.rising(*drawn),
    ]


def ablated(worse: Sequence[str], *, drawn: bool = False) -> Callable[[], list[Check]]:
    """Checks that all guidelines together do better than with each of these left out. What the law knows nothing of is
    judged by rows that were probed."""

    def checks() -> list[Check]:
        found = list[Check]()
        for name in worse:
            found += Table("table1-short").rising(f"K = 400, {name}", "K = 400")
            found += Table("fig-ablation-short").rising(name, "all guidelines")
            end = ", drawn" if drawn else ""
            found += Table("table1-full").rising(_full(f"K = 100, {name}{end}"), _full(f"K = 100{end}"))
        return found

    return checks


def group_norm() -> list[Check]:
    return Table("fig-ablation-short").rising("with BatchNorm", "with GroupNorm")


def skew() -> list[Check]:
    ways = ("K = 200, units", "K = 800, units", "backpropagation")
    return [check for way in ways for check in Table("table2-short").rising(f"Dirichlet: {way}", f"iid: {way}")]


def reached(k: int) -> Callable[[], list[Check]]:
    """A check that forward passes alone reach the paper's figure for K: rows that were probed, and drawn ones."""

    def checks() -> list[Check]:
        table, names = Table("table1-full"), (_full(f"K = {k}"), _full(f"K = {k}, drawn"))
        return [
            Check(
                table.stem,
                [table.figure(name) >= table.figure(name, "paper, %")],
                f"{_short(name)}: {table.figure(name):.1f}, paper {table.figure(name, 'paper, %'):.1f}",
                table.seeds(name),
            )
            for name in names
            if name in table.rows
        ]

    return checks


def near_backpropagation() -> list[Check]:
    table, names = Table("table1-full"), [_full("K = 500, drawn"), _full("backpropagation")]
    if not all(name in table.rows for name in names):
        return []
    ours, best = (table.figure(name) for name in names)
    return [Check(table.stem, [best - ours <= 3], f"{ours:.1f} against {best:.1f}", table.seeds(*names))]


def backpropagation() -> list[Check]:
    table, name = Table("table1-full"), _full("backpropagation")
    ours, paper = table.figure(name), table.figure(name, "paper, %")
    return [Check(table.stem, [abs(ours - paper) <= 1], f"{ours:.1f}, paper {paper:.1f}", table.seeds(name))]


def heads() -> list[Check]:
    """Against the better of two rates of backpropagation."""
    table = Table("table3-short")
    best = max(table.figure(row, "average") for row in table.rows if row.startswith("backpropagation"))
    names = ("K = 20", "K = 50", "K = 100", "K = 200", "K = 500")
    figures = [table.figure(name, "average") for name in names]
    words = f"{min(figures):.1f} to {max(figures):.1f} for K = 20 to 500, backpropagation {best:.1f}"
    return [Check(table.stem, [best - figure <= 5 for figure in figures], words, table.seeds(*names))]


def memory() -> list[Check]:
    columns = {
        "8 samples at a time": "of backpropagation (whole batch)",
        "whole batches": "of backpropagation",
        "both 8 at a time": "forward of that",
    }
    rows, found = Table("table4-short").page, list[Check]()
    for name, column in columns.items():
        at = rows["columns"].index(column)
        shares = [float(row[at].strip("%")) for row in rows["rows"]]
        words = f"{min(shares):.0f} to {max(shares):.0f} % ({name})"
        found.append(Check("table4-short", [share <= 10 for share in shares], words, "–"))
    return found


def hides() -> list[Check]:
    """One ΔL of noise is to be no further from real data than real batches are from each other, and whoever has the
    scalars of one client is to guess its labels and members no better than by chance."""
    page = Table("fig-attack-short").page
    one, chance = (page["columns"].index(column) for column in ("one client", "chance"))
    apart = [row for row in page["rows"] if row[0].startswith("figure 5") and row[0].endswith("KS")]
    alike = [float(row[one].split()[0]) <= float(row[chance].split()[-1].strip(")")) for row in apart]
    found = [Check("fig-attack-short", alike, f"one ΔL: in {sum(alike)} of {len(alike)} cases", "3")]
    for attack in ("labels, with public samples", "membership"):
        scores = [float(row[one].split()[0]) for row in page["rows"] if row[0] == attack]
        words = f"{attack.split(',')[0]}, from one client: {min(scores):.2f} to {max(scores):.2f}, chance 0.50"
        found.append(Check("fig-attack-short", [score <= 0.55 for score in scores], words, "3"))
    return found


def fedzo() -> list[Check]:
    table, column = Table("fedzo-short"), "rounds to 83.58 %"
    theirs = table.figure("FedZO, softmax regression", column)
    names = [f"softmax regression, K = {k}, shared directions" for k in (20, 100)]
    times = [theirs / table.figure(name, column) for name in names]
    words = f"{times[0]:.1f} times (K = 20), {times[1]:.1f} times (K = 100)"
    return [Check(table.stem, [each >= 50 for each in times], words, table.seeds("FedZO, softmax regression", *names))]


def alignment() -> list[Check]:
    page = Table("theorem2-short").page
    gaps = [abs(float(row[-1].strip("%"))) for row in page["rows"]]
    return [Check("theorem2-short", [gap <= 10 for gap in gaps], f"off by {max(gaps):.1f} % at most", "–")]


CLAIMS: dict[str, Callable[[], list[Check]]] = {
    "Forward passes alone reach 87.3 % with K = 100 (LeNet, MNIST)": reached(100),
    "They reach 92.2 % there with K = 500": reached(500),
    "More directions are better": more_directions,
    "With K = 500 they come within three points of backpropagation there": near_backpropagation,
    "Backpropagation ends at 94.3 % there": backpropagation,
    "Forward differences beat central ones at half the K": ablated(["central"]),
    "Hardswish beats ReLU and SELU": ablated(["ReLU", "SELU"]),
    "The average of the weights helps": ablated(["without EMA"], drawn=True),
    "GroupNorm beats BatchNorm": group_norm,
    "Label skew costs accuracy": skew,
    "Heads on a frozen backbone come within five points of backpropagation": heads,
    "The alignment of an estimate is √(K/(K + n + 1))": alignment,
    "A client needs at most a tenth of backpropagation's memory": memory,
    "Scalars hide a client's data": hides,
    "FedZO needs 50 times the rounds": fedzo,
}


def verdict(checks: Sequence[Check]) -> str:
    holds = [each for check in checks for each in check.holds]
    if not holds:
        return "not run"
    if all(holds):
        return "holds"
    return f"holds in part ({sum(holds)} of {len(holds)})" if any(holds) else "does not hold here"


def claims() -> str:
    lines = []
    for claim, measure in CLAIMS.items():
        checks = measure()
        full = [check for check in checks if check.page.endswith(FULL)]
        rest = [check for check in checks if not check.page.endswith(FULL)]
        elsewhere = NOT_AT_LENGTH.get(rest[0].page if rest else "", "not run at this length")
        at_length = verdict(full) if full else elsewhere
        figures = "; ".join(
            f"{', '.join(check.figures for check in checks if check.page == page)} "
            f"([{page}](../results/paper/{page}.md))"
            for page in dict.fromkeys(check.page for check in checks)
        )
        seeds = ", ".join(dict.fromkeys(check.seeds for check in checks))
        lines.append(f"| {claim} | {verdict(rest) if rest else '–'} | {at_length} | {figures} | {seeds} |")
    return "\n".join([HEAD, "|" + "---|" * (HEAD.count("|") - 1), *lines])


def not_run() -> str:
    """The rows of full length that are not on their pages, with the CPU hours of one seed, as results/paper_hours.json
    has measured them."""
    measured, lines = json.loads(HOURS.read_text())["groups"], list[str]()
    for group, row in measured.items():
        target, _, name = group.partition(": ")
        there = Table(f"{target}{FULL}").rows
        names = {each: each.removeprefix(f"{name}: ") for each in row["rows"] if "units" not in each}
        probed = [each for each in names if each not in there]
        neither = [each for each in probed if f"{each}, drawn" not in there]
        words = [
            f"all {len(names)} rows" if len(rows) == len(names) else "; ".join(names[each] for each in rows) or "–"
            for rows in (neither, probed)
        ]
        hours = ["no data here"] * 2
        if "missing" not in row:
            seconds, passes = row["cpu_seconds"], row["passes"]
            each_pass = seconds["probed"] / passes[row["first"]]
            drawn = sum(seconds["drawn"] for _ in neither)
            hours = [
                f"{of_all / 3600:.1f}"
                for of_all in (drawn, sum(each_pass * passes[each] or seconds["drawn"] for each in probed))
            ]
        lines.append(f"| {group} | {words[0]} | {hours[0]} | {words[1]} | {hours[1]} |")
    head = "| table | neither probed nor drawn | CPU hours, if drawn | not probed | CPU hours |"
    return "\n".join([head, "|" + "---|" * (head.count("|") - 1), *lines])
