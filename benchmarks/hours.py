"""The CPU time that rows of the paper's tables take at full length on this machine, for one seed.

    BAFFLE_DATA=... python benchmarks/hours.py --out results/paper_hours.json    # some minutes; goes on where it was

Rows of the same model and data set take as long as each other if their scalars are drawn, and grow with their forward
passes if they are probed. So a group of rows is measured by a few rounds of its first row each way, extrapolated as
`baffle paper --list` does, in CPU seconds.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

from kept import Kept

from baffle.core.probe import SCHEMES
from baffle.data.sources import data_folder
from baffle.errors import DataError
from baffle.measuring.duration import measure_duration
from baffle.paper.registry import TARGETS
from baffle.paper.target import DRAWN, with_drawn
from baffle.plan import Plan
from baffle.task.load import load_task

NAMES = ("table1", "table2", "fig-k", "fig-ablation")


def groups() -> dict[str, dict[str, Plan]]:
    """The rows of each group of a target. A row's name begins with that of its group."""
    found = dict[str, dict[str, Plan]]()
    for target in NAMES:
        for row, plan in TARGETS[target].plans("full").items():
            group, _, rest = row.rpartition(": ")
            found.setdefault(f"{target}: {group}" if rest != row else target, {})[row] = plan
    return found


def measured(rows: dict[str, Plan]) -> dict[str, Any]:
    first = next(iter(rows))
    both = {"probed": rows[first], "drawn": with_drawn({first: rows[first]})[first + DRAWN]}
    try:
        seconds = {
            how: round(measure_duration(load_task(plan, data_folder(None)), time.process_time).total, 1)
            for how, plan in both.items()
        }
    except DataError:  # its words name a folder of this machine
        return {"rows": [*rows], "missing": rows[first].task.data}
    passes = {
        row: SCHEMES[plan.probe.scheme].forwards(plan.probe.k) if plan.scalars else 0 for row, plan in rows.items()
    }
    return {"rows": [*rows], "passes": passes, "first": first, "cpu_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="PATTERN", help="groups, as 'table1: LeNet*'")
    parser.add_argument("--out", type=Path, help="write results here, and continue from those that are already there")
    args = parser.parse_args()
    results = Kept(args.out, args.only or ["*"], ("groups",))
    for group, rows in groups().items():
        results.note("groups", group, partial(measured, rows))


if __name__ == "__main__":
    main()
