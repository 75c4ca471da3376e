"""A grid is a list of named plans: one plan with every combination of some settings, each with every seed."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path

from baffle.errors import PlanError
from baffle.plan import Plan, change

Rows = Mapping[str, Mapping[int, Plan]]
"""The plans of a grid: for each row its name, and a plan for each seed."""

MOST_RUNS = 10_000
LONGEST_NAME = 120  # characters of a run's name that its folder's name takes over


def grid_of(plan: Plan, axes: Iterable[str] = (), seeds: Sequence[int] = ()) -> dict[str, dict[int, Plan]]:
    """A plan with every combination of these axes, such as "update.rate=0.003,0.01", each with every seed; without
    seeds, with the plan's own."""
    axes = list(axes)
    values = dict(map(_axis, axes))
    if len(values) < len(axes):
        raise PlanError("--grid names a setting twice; give all its values at once, as in update.rate=0.003,0.01")
    if "seed" in values:
        raise PlanError("seed: --grid does not take it, because rows are means over seeds; give --seeds 0..4 instead")
    seeds = seeds or [plan.seed]
    if (runs := prod(map(len, values.values())) * len(seeds)) > MOST_RUNS:
        raise PlanError(f"the grid has {runs:,} runs; expected at most {MOST_RUNS:,}: leave some values out")
    rows = dict[str, dict[int, Plan]]()
    for combination in product(*values.values()):
        settings = [f"{key}={value}" for key, value in zip(values, combination, strict=True)]
        rows[", ".join(settings) or plan.name] = with_seeds(change(plan, settings), seeds)
    _require_different(rows)
    return rows


def with_seeds(plan: Plan, seeds: Iterable[int]) -> dict[int, Plan]:
    return {seed: change(plan, [f"seed={seed}"]) for seed in seeds}


def name_of(row: str, seed: int) -> str:
    """The name of one run of a row."""
    return f"{row}, seed {seed}"


def _axis(text: str) -> tuple[str, list[str]]:
    """The key of an axis, and its values: commas within brackets do not part them."""
    key, equals, rest = (part.strip() for part in text.partition("="))
    values, depth = [""], 0
    for character in rest:
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            values.append("")
        else:
            values[-1] += character
    if not equals or not all(value.strip() for value in values):
        raise PlanError(f"--grid has the form section.key=value,value, got {text!r}")
    return key, [value.strip() for value in values]


def _require_different(rows: Rows) -> None:
    """Refuse a grid that holds the same row twice."""
    names = dict[bytes, str]()
    for name, plans in rows.items():
        digest = next(iter(plans.values())).digest()
        if (other := names.setdefault(digest, name)) != name:
            raise PlanError(f"--grid: {other} and {name} are the same plan; leave one of them out")


def seeds_of(text: str) -> list[int]:
    """Seeds as a command line gives them: a range such as 0..4, which includes 4, or a list such as 0,3,7."""
    whole = re.fullmatch(r"\s*(\d{1,18})\s*\.\.\s*(\d{1,18})\s*", text)
    if whole and int(whole[1]) <= int(whole[2]) < int(whole[1]) + MOST_RUNS:
        return list(range(int(whole[1]), int(whole[2]) + 1))
    seeds = [int(part) for part in text.split(",") if re.fullmatch(r"\s*\d{1,18}\s*", part)]
    if whole or "," not in text or len(seeds) != len(text.split(",")):
        raise PlanError(f"--seeds: expected a range such as 0..4 or a list such as 0,3,7, got {text!r}")
    return list(dict.fromkeys(seeds))


def folder_of(into: Path, name: str, plan: Plan) -> Path:
    """The folder of a run below `into`. Its name ends with the plan's digest, so that no run is taken for another."""
    readable = re.sub(r"[^\w.=-]+", "-", name)[:LONGEST_NAME].strip("-.")
    return into / f"{readable}-{plan.digest().hex()[:12]}"
