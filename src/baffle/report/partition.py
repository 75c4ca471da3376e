"""Who holds which samples of a run, if this machine can read the data that its plan names."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baffle.data.holdings import Holding, holdings
from baffle.data.partition import share_out
from baffle.data.sources import load
from baffle.errors import BaffleError, one_line
from baffle.report.record import RunRecord

MOST_ROWS = 40
"""A chart shows at most so many clients, from the smallest to the largest at even steps."""


@dataclass(frozen=True)
class Partition:
    """Each client's holding, or why it is not known."""

    holdings: tuple[Holding, ...]
    missing: str = ""


def partition_of(run: RunRecord, data: Path | None = None, *, own_code: bool = False) -> Partition:
    """The partition of a run. A plan may name a function of somebody's own as its data; that is only called with
    `own_code`, for a folder may have come from a stranger."""
    plan = run.plan
    if run.networked:
        return Partition((), "The server of a networked run does not know it: each client has its own samples.")
    if run.given:
        return Partition((), "A program gave the data as objects (baffle.fit); the run's folder does not hold them.")
    if ":" in plan.task.data and not own_code:
        return Partition((), f"The plan's data come from {plan.task.data}, which is not run to make a report.")
    try:
        source = load(plan.task.data, data, plan.task.pixels)
        return Partition(tuple(holdings(source, share_out(plan, source))))
    except BaffleError as fault:
        return Partition((), f"The data cannot be read here: {one_line(str(fault))}.")


def shown(partition: Partition) -> list[Holding]:
    """All clients, or a selection of many."""
    held = list(partition.holdings)
    if len(held) <= MOST_ROWS:
        return held
    ranked = sorted(held, key=lambda holding: holding.samples)
    return [ranked[place] for place in np.linspace(0, len(held) - 1, MOST_ROWS).astype(int)]
