"""Builds the page of a target: runs what is not finished, then writes the result."""

import json
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from baffle.errors import DataError, PlanError
from baffle.paper.page import kept_runs, write
from baffle.paper.target import Finished, Origin, Scale, Target, Tell
from baffle.plan import Plan, load
from baffle.server.recorder import Watch
from baffle.simulation import resume, simulate
from baffle.task.features import Backbones


class Onlooker(NamedTuple):
    """Receives progress. Given the name of a run or a measurement, each field opens a place to report to."""

    watching: Callable[[str], AbstractContextManager[Watch]]
    telling: Callable[[str], AbstractContextManager[Tell]]


def build_page(
    target: Target,
    scale: Scale,
    runs: Path,
    out: Path,
    onlooker: Onlooker,
    data: Path | None,
    only: Sequence[str] = (),
) -> Path:
    """Run a target and write NAME-SCALE.md, .json and .png into `out`.

    A finished run of the same plan under `runs` is used as it is, and a stopped one is resumed. A run whose data set is
    missing is skipped, and the page says so; if every run lacks its data, there is no page. `only` chooses the runs
    whose names contain one of these texts. Rows already on the page stay while their plans are the same.
    """
    plans = target.plans(scale)
    chosen = _chosen(target.name, plans, only)
    origin = _origin()
    backbones = Backbones()
    finished = dict[str, Finished]()
    faults = dict[str, DataError]()
    for name in chosen:
        with onlooker.watching(name) as watch:
            plan = plans[name]
            folder = f"{target.name}-{scale}-{plan.digest().hex()[:12]}"
            try:
                finished[name] = _run(runs / folder, plan, watch, data, backbones, origin)
            except DataError as fault:
                faults[name] = fault
    if faults and not finished:
        raise next(iter(faults.values()))
    known = kept_runs(out / f"{target.name}-{scale}.json", plans) | finished
    shown = {name: known[name] for name in plans if name in known}
    skipped = {name: fault for name, fault in faults.items() if name not in shown}
    rest = len(plans) - len(shown) - len(skipped)
    with onlooker.telling(target.name) as tell:
        result = target.result(shown, scale, data, tell)
    notes = [*result.notes, *_skipped(skipped), *([f"Not asked for: {rest} of {len(plans)} rows."] if rest else [])]
    return write(target, scale, replace(result, notes=notes), shown, out, origin, list(shown) if rest else ())


def _chosen(target: str, names: Collection[str], only: Sequence[str]) -> list[str]:
    """The rows to run. A text that is a row's whole name chooses that row alone, even if other names contain it."""
    if only and not names:
        raise PlanError(f"{target} is measured as a whole; expected no --only")
    whole = {name.lower() for name in names}

    def is_chosen(name: str, text: str) -> bool:
        return text == name if text in whole else text in name

    chosen = [name for name in names if not only or any(is_chosen(name.lower(), text.lower()) for text in only)]
    if names and not chosen:
        raise PlanError(f"no row's name contains {' or '.join(only)}; expected a part of one of: {'; '.join(names)}")
    return chosen


def _skipped(faults: Mapping[str, DataError]) -> list[str]:
    """One line for each reason, with the rows that are left out for it."""
    reasons = dict.fromkeys(str(fault) for fault in faults.values())
    return [
        f"Left out: {'; '.join(name for name, fault in faults.items() if str(fault) == reason)} ({reason})."
        for reason in reasons
    ]


def _run(path: Path, plan: Plan, watch: Watch, data: Path | None, backbones: Backbones, origin: Origin) -> Finished:
    if not (path / "plan.toml").exists():
        simulate(plan, path, data=data, watch=watch, backbones=backbones)
    elif not (path / "summary.json").exists():
        resume(path, data=data, watch=watch)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    summary = json.loads((path / "summary.json").read_text())
    metrics = [json.loads(line) for line in lines]
    return Finished(load(str(path / "plan.toml")), summary, metrics, plan.digest().hex(), origin)


def _origin() -> Origin:
    """Today, and the commit of the running source, or "unknown" if it is not a checkout."""
    here = Path(__file__).resolve().parent
    git = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    return Origin(f"{datetime.now(UTC):%Y-%m-%d}", git.stdout.strip() or "unknown")
