"""Directions that cost less than a plan's own: a short trial says whether they train as well."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from baffle.plan import Plan
from baffle.task.choice import OPEN, Prices, cheaper_way, way_of
from baffle.task.features import Backbones
from baffle.tune.race import Race, Runner, Tell
from baffle.tune.split import is_clearly_less
from baffle.tune.trial import Ground, Spent


def judge_prices(
    ground: Ground,
    sigma: float,
    reference: Race,
    prices: Prices,
    data: str | Path | None,
    backbones: Backbones,
    tell: Tell,
) -> list[str]:
    """What to make of directions that cost half of the plan's or less: as many of them, at the rate of the race's
    winner and for as many rounds. The trial is not counted with the others, because whether it is made depends on how
    quick this machine is."""
    plan = ground.plan
    cheaper = cheaper_way(plan.probe, prices)
    if cheaper is None:
        return []
    if plan.privacy.on:
        return [f"{cheaper.saving}; no trial, because the clipping norm is for the plan's own ({cheaper.remedy})"]
    tell(f"{cheaper.way} instead of {way_of(plan.probe)}, rate {reference.winner.rate:g}")
    other = Ground(along(plan, prices[cheaper.way].settings), data, Spent(), backbones)
    trial = other.advance(other.begin(sigma, reference.winner.rate), reference.rounds)
    runner = Runner(reference.winner.rate, trial, other.losses(trial))
    losses = f"{runner.loss:.4g} against {reference.winner.loss:.4g}"
    return [
        f"{cheaper.saving}; held-out loss after {reference.rounds} rounds at the same rate {losses}, "
        f"{verdict(runner, reference.winner, cheaper.remedy)}"
    ]


def along(plan: Plan, settings: Mapping[str, Any]) -> Plan:
    """The plan with other directions."""
    return msgspec.structs.replace(plan, probe=msgspec.structs.replace(plan.probe, **{**OPEN, **settings}))


def verdict(cheap: Runner, own: Runner, remedy: str) -> str:
    """A cheaper scalar is not always a better one."""
    if is_clearly_less(own, cheap):
        return "clearly higher: the plan keeps its own, unless more rounds or directions make up for it"
    return f"{'clearly lower' if is_clearly_less(cheap, own) else 'no clear difference'}: {remedy}"
