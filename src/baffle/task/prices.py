"""What a scalar costs along each kind of directions, and advice that follows from it."""

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from baffle.core.arrays import F32
from baffle.core.directions import OUTER, dense
from baffle.core.ports import Batch, Runtime
from baffle.core.probe import losses_along
from baffle.plan import Plan, ProbeSettings
from baffle.stopwatch import Stopwatch
from baffle.trajectory import trajectory_of

DIRECTIONS, SECONDS = 64, 0.3  # a kind is measured with at most this many directions, and for about so many CPU seconds
GAIN = 0.9  # others are chosen over dense directions if they take less than this share of their time
OPEN: Mapping[str, Any] = {"layout": (), "shapes": (), "together": 0}  # what follows from the kind, left open again
SINGULAR = {"layers": "layer", "stages": "stage", "units": "unit"}  # what directions are called, if not as their kind


class Price(NamedTuple):
    """CPU seconds of a scalar along directions of one kind, and the settings of [probe] that give them."""

    seconds: float
    settings: Mapping[str, Any]


Prices = Mapping[str, Price]  # the price of each kind of directions that a model allows


def kinds_of(probe: ProbeSettings) -> dict[str, dict[str, Any]]:
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


def kind_of(probe: ProbeSettings) -> str:
    """The kind of directions that a settled plan has."""
    return OUTER if probe.moves_whole_models and probe.together > 1 else probe.supports


def seconds_of_scalar(plan: Plan, runtime: Runtime, weights: F32, batch: Batch, stopwatch: Stopwatch) -> float:
    """CPU seconds of a scalar along a settled plan's directions."""
    trajectory = trajectory_of(plan, len(weights))
    loss, directions = runtime.on(batch), trajectory.directions(0)
    every = trajectory.supports or dense(trajectory.n, 1)  # an exact head may be all of the model

    def probe(count: int) -> object:
        spread = [every[i * len(every) // count] for i in range(count)]
        return losses_along(loss, weights, directions, spread, plan.probe.sigma)

    return stopwatch.seconds_each(probe, min(DIRECTIONS, len(every)), SECONDS)


def quickest_kind(prices: Prices) -> str:
    """The cheapest kind of directions; dense ones if it hardly matters."""
    best = min(prices, key=lambda kind: prices[kind].seconds)
    return best if prices[best].seconds < GAIN * prices["dense"].seconds else "dense"


class Cheaper(NamedTuple):
    """Directions that cost half of a plan's or less: what is saved, and how to have them, in words."""

    kind: str
    saving: str
    remedy: str


def cheaper_kind(probe: ProbeSettings, prices: Prices) -> Cheaper | None:
    """The cheapest directions, if they cost half of the plan's or less."""
    ours, best = kind_of(probe), quickest_kind(prices)
    if ours not in prices or prices[best].seconds > prices[ours].seconds / 2:
        return None
    settings = [
        f'probe.{name} = "{value}"' for name, value in prices[best].settings.items() if value != getattr(probe, name)
    ]
    took, takes = 1000 * prices[ours].seconds, 1000 * prices[best].seconds
    saving = f"along {SINGULAR.get(best, best)} directions a scalar takes {takes:.2g} ms of CPU instead of {took:.2g}"
    return Cheaper(best, saving, f"set {' and '.join(settings)}")


def advice_on_prices(probe: ProbeSettings, prices: Prices) -> list[str]:
    """Names directions that cost half of the plan's or less, if there are any."""
    cheaper = cheaper_kind(probe, prices)
    if cheaper is None:
        return []
    return [f"{cheaper.saving}: {cheaper.remedy}; baffle tune tries whether they train as well"]


def seconds_of(prices: Prices) -> dict[str, float]:
    return {kind: price.seconds for kind, price in prices.items()}


def in_words(seconds: Mapping[str, float]) -> str:
    """Prices in words, the quickest first: "outer 0.07 ms; dense and layers 0.42 ms"."""
    alike = dict[float, list[str]]()
    for kind, price in sorted(seconds.items(), key=itemgetter(1)):
        alike.setdefault(price, []).append(kind)
    return "; ".join(f"{_listed(*names)} {1000 * price:.2g} ms" for price, names in alike.items())


def _listed(*names: str) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
