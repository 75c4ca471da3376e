"""Carries a target out: runs what is not finished, then makes its page."""

import json
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from baffle.errors import DataError, PlanError
from baffle.paper.page import held, write
from baffle.paper.target import Finished, Origin, Scale, Target, Tell
from baffle.plan import Plan, load
from baffle.server.recorder import Watch
from baffle.simulation import resume, simulate
from baffle.task.features import Backbones


class Onlooker(NamedTuple):
    """Somebody who wants to know how far it is: whom runs and measurements of some name tell."""

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
    """Run a target and write NAME-SCALE.md, .json and .png into `out`. A run of the same plan that is there
    already is gone on with, or taken as it is if it is finished. One whose data is not there is skipped, and the page
    says so; where no run has its data, there is no page. With `only`, runs whose names hold one of these texts; rows
    that are on the page already stay there while their plans are the same."""
    finished, faults, backbones, origin = {}, dict[str, DataError](), Backbones(), _origin()
    plans = target.plans(scale)
    asked = _asked(plans, only)
    if only and not plans:
        raise PlanError(f"{target.name} is measured as a whole; expected no --only")
    if plans and not asked:
        raise PlanError(f"no row's name holds {' or '.join(only)}; expected a part of one of: {'; '.join(plans)}")
    for name in asked:
        with onlooker.watching(name) as watch:
            plan = plans[name]
            folder = f"{target.name}-{scale}-{plan.digest().hex()[:12]}"
            try:
                finished[name] = _run(runs / folder, plan, watch, data, backbones, origin)
            except DataError as fault:
                faults[name] = fault
    if faults and not finished:
        raise next(iter(faults.values()))
    known = held(out / f"{target.name}-{scale}.json", plans) | finished
    shown = {name: known[name] for name in plans if name in known}
    skipped = {name: fault for name, fault in faults.items() if name not in shown}
    rest = len(plans) - len(shown) - len(skipped)
    with onlooker.telling(target.name) as tell:
        result = target.result(shown, scale, data, tell)
    notes = [*result.notes, *_skipped(skipped), *([f"Not asked for: {rest} of {len(plans)} rows."] if rest else [])]
    return write(target, scale, replace(result, notes=notes), shown, out, origin, list(shown) if rest else ())


def _asked(names: Collection[str], only: Sequence[str]) -> list[str]:
    """The rows that somebody wants. A text that is the name of a row is that row alone, though other names hold it."""
    exact = {name.lower() for name in names}

    def is_wanted(name: str, text: str) -> bool:
        return text == name if text in exact else text in name

    return [name for name in names if not only or any(is_wanted(name.lower(), text.lower()) for text in only)]


def _skipped(faults: Mapping[str, DataError]) -> list[str]:
    """For each reason, a line that names the rows that are left out for it."""
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
    """Today, and the commit of the source that runs, where it is a checkout."""
    here = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    return Origin(f"{datetime.now(UTC):%Y-%m-%d}", done.stdout.strip() or "unknown")
