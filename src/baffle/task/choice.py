"""Which directions are the quickest to a scalar here: a short measurement on made-up samples."""

import time
from collections.abc import Callable, Mapping
from operator import itemgetter
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

LONG = 0.3
"""CPU seconds that turns with more may take in all, beyond the first."""

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


OPEN: Mapping[str, Any] = {"layout": (), "shapes": (), "together": 0}
"""What follows from the kind of directions, left to a run again."""


class Price(NamedTuple):
    """CPU seconds of a scalar along directions of one kind, and the settings that give them."""

    seconds: float
    settings: Mapping[str, Any]


Prices = Mapping[str, Price]
"""What a scalar costs along each kind of directions that a model allows."""


def ways(probe: ProbeSettings) -> dict[str, dict[str, Any]]:
    """The kinds of directions that a plan can have, with their settings. One layer at a time stays one at a time."""
    drawn = "rademacher" if probe.distribution == OUTER else probe.distribution
    whole = {
        "dense": {"supports": "dense", "distribution": drawn},
        "layers": {"supports": "layers", "distribution": drawn},
        OUTER: {"supports": "layers" if probe.supports == "layers" else "dense", "distribution": OUTER},
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
            alone = settled.plan.probe.moves_whole_models and settled.plan.probe.together <= 1
            as_dense = alone and "dense" in prices
            seconds = prices["dense"].seconds if as_dense else _seconds(settled, weights, batch)
        except PlanError:
            continue
        prices[way] = Price(seconds, settings)
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
    if few * FEW > QUICK:
        return few
    turns = TURNS if TURNS * few * MANY <= LONG else max(1, int(LONG / (few * MANY)))
    return min(took(MANY) for _ in range(turns))


def quickest_way(prices: Prices) -> str:
    """The cheapest kind of directions; dense ones if it hardly matters."""
    best = min(prices, key=lambda way: prices[way].seconds)
    return best if prices[best].seconds < GAIN * prices["dense"].seconds else "dense"


def way_of(probe: ProbeSettings) -> str:
    """The kind of directions that a settled plan has."""
    return OUTER if probe.moves_whole_models and probe.together > 1 else probe.supports


SINGULAR = {"layers": "layer", "stages": "stage", "units": "unit"}
"""What directions of a kind are called, where it differs."""


class Cheaper(NamedTuple):
    """Directions that cost half of a plan's or less: what is saved, and how to have them, in words."""

    way: str
    saving: str
    remedy: str


def cheaper_way(probe: ProbeSettings, prices: Prices) -> Cheaper | None:
    """The cheapest directions, if they cost half of the plan's or less."""
    ours, best = way_of(probe), quickest_way(prices)
    if ours not in prices or prices[best].seconds > prices[ours].seconds / 2:
        return None
    settings = [
        f'probe.{name} = "{value}"' for name, value in prices[best].settings.items() if value != getattr(probe, name)
    ]
    took, takes = 1000 * prices[ours].seconds, 1000 * prices[best].seconds
    saving = f"along {SINGULAR.get(best, best)} directions a scalar takes {takes:.2g} ms of CPU instead of {took:.2g}"
    return Cheaper(best, saving, f"set {' and '.join(settings)}")


def advice_on_prices(probe: ProbeSettings, prices: Prices) -> list[str]:
    """Which directions would be cheaper than the plan's, if some are by half."""
    cheaper = cheaper_way(probe, prices)
    if cheaper is None:
        return []
    return [f"{cheaper.saving}: {cheaper.remedy}; baffle tune tries whether they train as well"]


def seconds_of(prices: Prices) -> dict[str, float]:
    return {way: price.seconds for way, price in prices.items()}


def told(seconds: Mapping[str, float]) -> str:
    """Prices in words, the quickest first: "outer 0.07 ms; dense and layers 0.42 ms"."""
    alike = dict[float, list[str]]()
    for way, price in sorted(seconds.items(), key=itemgetter(1)):
        alike.setdefault(price, []).append(way)
    return "; ".join(f"{_listed(names)} {1000 * price:.2g} ms" for price, names in alike.items())


def _listed(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
