"""Which directions are the quickest to a scalar here: a short measurement on made-up samples."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from baffle.core.arrays import F32
from baffle.core.directions import OUTER
from baffle.core.ports import Batch, Runtime
from baffle.core.probe import losses_along
from baffle.errors import PlanError
from baffle.plan import Plan, ProbeSettings
from baffle.trajectory import trajectory_of

FEW, MANY = 8, 64
"""Directions of a measurement: a few first, and more if these were quick."""

QUICK = 0.1
"""CPU seconds that the few may take."""

TURNS = 3

GAIN = 0.9
"""Other directions are chosen over dense ones only if they take less than this share of the time, so that noise seldom
decides."""


class Settled(NamedTuple):
    """A plan with nothing left open, and a runtime that follows it."""

    plan: Plan
    runtime: Runtime


Settle = Callable[[Mapping[str, Any]], Settled]
"""Settings of [probe] → the plan with them."""


class Price(NamedTuple):
    """CPU seconds of a scalar along directions of one kind, and the settings that give them."""

    seconds: float
    settings: Mapping[str, Any]


def ways(probe: ProbeSettings) -> dict[str, dict[str, Any]]:
    """The kinds of directions that a plan can have, with their settings."""
    drawn = "rademacher" if probe.distribution == OUTER else probe.distribution
    whole = {
        "dense": {"supports": "dense", "distribution": drawn},
        "outer": {"supports": "dense", "distribution": OUTER},
    }
    if probe.stacked or probe.precision != "float32":
        return whole
    return whole | {part: {"supports": part, "distribution": drawn} for part in ("stages", "units")}


def measure_prices(probe: ProbeSettings, settle: Settle, weights: F32, batch: Batch) -> dict[str, Price]:
    """What a scalar costs along each kind of directions that this model allows. Directions of one layer each cost what
    dense ones do, and so do outer ones that share no pass."""
    prices = dict[str, Price]()
    for way, settings in ways(probe).items():
        try:
            settled = settle(settings)
        except PlanError:
            continue
        if way != OUTER or settled.plan.probe.together > 1:
            prices[way] = Price(_seconds(settled, weights, batch), settings)
    return prices


def _seconds(settled: Settled, weights: F32, batch: Batch) -> float:
    """CPU seconds of a scalar: the least of a few turns, which other work on the machine can only add to."""
    trajectory = trajectory_of(settled.plan, len(weights))
    loss, directions = settled.runtime.on(batch), trajectory.directions(0)
    loss(weights)

    def took(count: int) -> float:
        count = min(count, len(trajectory.supports))
        spread = [trajectory.supports[i * len(trajectory.supports) // count] for i in range(count)]
        began = time.process_time()
        losses_along(loss, weights, directions, spread, settled.plan.probe.sigma)
        return (time.process_time() - began) / count

    few = took(FEW)
    return few if few * FEW > QUICK else min(took(MANY) for _ in range(TURNS))


def quickest_way(prices: Mapping[str, Price]) -> str:
    """The cheapest kind of directions; dense ones if it hardly matters."""
    best = min(prices, key=lambda way: prices[way].seconds)
    return best if prices[best].seconds < GAIN * prices["dense"].seconds else "dense"


def way_of(probe: ProbeSettings) -> str:
    """The kind of directions that a settled plan has."""
    if probe.moves_whole_models:
        return OUTER if probe.together > 1 else "dense"
    return probe.supports


def advice_on_prices(probe: ProbeSettings, prices: Mapping[str, Price]) -> list[str]:
    """Which directions would be cheaper than the plan's, if some are by half."""
    ours, best = way_of(probe), quickest_way(prices)
    if ours not in prices or prices[best].seconds > prices[ours].seconds / 2:
        return []
    settings = " and ".join(
        f'probe.{name} = "{value}"' for name, value in prices[best].settings.items() if value != getattr(probe, name)
    )
    return [
        f"along {best} directions a scalar would take {1000 * prices[best].seconds:.2g} ms of CPU instead of "
        f"{1000 * prices[ours].seconds:.2g}: set {settings}"
    ]


def told(prices: Mapping[str, Price]) -> str:
    """Prices in words: "dense 0.42 ms, outer 0.07 ms"."""
    return ", ".join(f"{way} {1000 * price.seconds:.2g} ms" for way, price in prices.items())
