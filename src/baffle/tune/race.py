"""Chooses the rate by a race: short trials from the initial weights, on the same batches and along the same directions.

Rates are tried in proportion to the step that the optimizer takes at rate 1, measured on one estimate: Adam normalises,
so its step is about 1 in every weight; that of SGD follows the size of the scalars. The first leg tries widely spaced
rates until the loss gets worse. The best ones go on in the next legs, which are longer and have fewer rates.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from baffle.client.abstaining import Tell
from baffle.core.arrays import F64, rms
from baffle.tune.trial import Ground, Trial

FIRST_STEP = 0.05  # the race begins with steps of this share of a typical weight
STEP_FROM_ZERO = 0.01  # ... or of this size if all weights begin at zero
LEGS = (1 / 30, 1 / 8, 1 / 4)  # how far the legs of a race go, as shares of the run
SHORTEST, LONGEST = 4, 100  # every leg has at least and at most so many rounds
STRIDE = 2  # the first leg tries every second rate of the 1-2-5 series
FARTHEST = 36  # the first leg moves at most so many rates away from its start: twelve orders of magnitude


@dataclass
class Runner:
    """A rate in the race: its trial, and the held-out losses at the end of each leg that it ran."""

    rate: float
    trial: Trial
    losses: F64

    @property
    def loss(self) -> float:
        return float(np.mean(self.losses))


def run_trial(ground: Ground, trial: Trial, end: int) -> Runner:
    """A trial that goes on until `end` rounds are played, and its losses there."""
    trial = ground.advance(trial, end - trial.present.round)
    return Runner(trial.trajectory.plan.update.rate, trial, ground.losses(trial))


@dataclass(frozen=True)
class Leg:
    """How a leg ended: after how many rounds, and the loss of each rate."""

    rounds: int
    losses: dict[float, float]


@dataclass
class Race:
    """A race that is over."""

    winner: Runner
    legs: list[Leg] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return self.legs[-1].rounds


def series(number: int) -> float:
    """…, 0.1, 0.2, 0.5, 1, 2, 5, 10, … Number 0 is 1."""
    return float(f"{(1, 2, 5)[number % 3]}e{number // 3}")


def nearest(value: float) -> int:
    """The number of the nearest value of the series, by ratio."""
    guess = math.floor(3 * math.log10(value))
    return min(range(guess - 2, guess + 4), key=lambda number: abs(math.log(series(number) / value)))


def legs_of(rounds: int) -> list[int]:
    """The rounds after which the legs of a race end, for a run of so many rounds."""
    ends = [min(max(SHORTEST, round(share * rounds)), LONGEST) for share in LEGS]
    return [min(end, rounds) for end in ends]


def extended(rate: float, raced: int, rounds: int) -> float:
    """The best rate for a run of `rounds`, from the best after `raced`. A longer run affords smaller steps: the
    distance grows with the rounds, the noise that remains with the step. The root of the
    rounds is a compromise between tasks: `benchmarks/tuning.py` follows the best rate through whole runs."""
    return rate * math.sqrt(min(1.0, raced / rounds))


def best_rate(leg: Leg) -> float:
    """The rate with the least loss, by a parabola through the best and its two neighbours where they were tried."""
    rates = sorted(leg.losses)
    at = min(range(len(rates)), key=lambda number: leg.losses[rates[number]])
    if not 0 < at < len(rates) - 1:
        return rates[at]
    x = np.log([rates[at - 1], rates[at], rates[at + 1]])
    y = np.array([leg.losses[rate] for rate in rates[at - 1 : at + 2]])
    if not np.isfinite(y).all():
        return rates[at]
    a, b, _ = np.polyfit(x, y, 2)
    return float(np.exp(np.clip(-b / (2 * a), x[0], x[2]))) if a > 0 else rates[at]


def race(ground: Ground, sigma: float, rounds: int, tell: Tell, legs: int = len(LEGS)) -> Race:
    """Find the best rate for a run of `rounds`, in so many legs."""
    first, *later = legs_of(rounds)[:legs]
    runners: dict[int, Runner] = {}

    def loss_after(end: int, number: int) -> float:
        trial = runners[number].trial if number in runners else ground.begin(sigma, series(number))
        runners[number] = run_trial(ground, trial, end)
        loss = runners[number].loss
        shown = f"{loss:.4g}" if math.isfinite(loss) else "not finite"
        tell(f"rate {series(number):g}: loss {shown} after {end} rounds")
        return loss

    best = _climb(partial(loss_after, first), nearest(first_rate(ground, sigma)))
    ended = [Leg(first, {runner.rate: runner.loss for runner in runners.values()})]
    for end in later:
        tried = _settle(partial(loss_after, end), best)
        ended.append(Leg(end, {series(number): loss for number, loss in tried.items()}))
        best = min(tried, key=tried.__getitem__)
    return Race(runners[best], ended)


def first_rate(ground: Ground, sigma: float) -> float:
    """A rate whose steps are small against the weights, by the optimizer's own step at rate 1."""
    unit = ground.unit_step(sigma)
    weights = rms(ground.initial)
    step = FIRST_STEP * weights if weights > 0 else STEP_FROM_ZERO
    return step / unit if math.isfinite(unit) and unit > 0 else step


def _climb(loss: Callable[[int], float], start: int) -> int:
    """The number with the least loss, along strides from the start: up while that helps, else down."""
    best, least = start, loss(start)
    for stride in (STRIDE, -STRIDE):
        while abs(best + stride - start) <= FARTHEST:
            tried = loss(best + stride)
            if not tried < least:
                break
            best, least = best + stride, tried
        if best != start:
            break
    return best


def _settle(loss: Callable[[int], float], start: int) -> dict[int, float]:
    """The losses around their least one, which has a worse neighbour on either side: from the start down, then up."""
    losses = {start: loss(start)}
    for stride in (-1, 1):
        at = start
        while abs(at + stride - start) <= FARTHEST:
            losses[at + stride] = loss(at + stride)
            if not losses[at + stride] < losses[at]:
                break
            at += stride
        if stride == -1 and at != start:
            break
    return losses
