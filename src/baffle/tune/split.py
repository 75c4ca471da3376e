"""K and batch at a fixed number of rows: whether more directions on fewer samples train better, by trials."""

from dataclasses import dataclass

import numpy as np

from baffle.task.load import Task
from baffle.tune.race import Leg, Race, Runner, Tell, legs_of, nearest, series
from baffle.tune.trial import Ground

FACTOR = 4
"""Splits are tried with so many times the directions, or the samples."""

LEAST_SAMPLES = 8
"""A client's default policy refuses rounds with fewer samples."""

LEAST_DIRECTIONS = 8
"""With fewer directions a round says next to nothing."""

SURE = 2.0
"""A split is better if its loss is lower by this many standard errors, over the pieces of the held-out samples."""


@dataclass(frozen=True)
class Split:
    """Another split, and how it did."""

    ground: Ground
    race: Race
    is_better: bool


def splits_of(task: Task) -> list[tuple[int, int]]:
    """Other pairs of K and batch with the same rows. None at epoch level, where a client's steps would change too, and
    none for tiers, whose own K would have to change."""
    plan = task.plan
    k, batch = plan.probe.k, plan.federation.batch
    smallest = min(len(share) for share in task.shares)
    if plan.federation.level == "epoch" or plan.federation.tiers or not batch or batch > smallest:
        return []
    found = []
    if batch % FACTOR == 0 and batch // FACTOR >= LEAST_SAMPLES:
        found.append((k * FACTOR, batch // FACTOR))
    if k % FACTOR == 0 and k // FACTOR >= LEAST_DIRECTIONS and batch * FACTOR <= smallest:
        found.append((k // FACTOR, batch * FACTOR))
    return found


def compare(ground: Ground, sigma: float, rounds: int, reference: Race, tell: Tell) -> Split:
    """Race a split at two rates, that of the reference and the next one: more directions make estimates better and
    afford larger steps, fewer need smaller ones. The better goes on to where the reference ended."""
    *_, middle, end = legs_of(rounds)
    more = ground.plan.probe.k > reference.winner.trial.trajectory.plan.probe.k
    here = nearest(reference.winner.rate)
    runners = []
    for number in (here, here + (1 if more else -1)):
        trial = ground.advance(ground.begin(sigma, series(number)), middle)
        runners.append(Runner(series(number), trial, ground.losses(trial)))
        tell(f"K = {ground.plan.probe.k}, rate {series(number):g}: loss {runners[-1].loss:.4g} after {middle} rounds")
    best = min(runners, key=lambda runner: runner.loss)
    trial = ground.advance(best.trial, end - middle)
    winner = Runner(best.rate, trial, ground.losses(trial))
    raced = Race(winner, [Leg(end, {winner.rate: winner.loss})])
    return Split(ground, raced, is_clearly_less(winner, reference.winner))


def is_clearly_less(one: Runner, other: Runner) -> bool:
    """Whether a loss is lower by more than chance, piece by piece on the same held-out samples."""
    if not np.isfinite(one.losses).all():
        return False
    gains = other.losses - one.losses
    if not np.isfinite(gains).all():
        return True
    error = float(np.std(gains, ddof=1)) / np.sqrt(len(gains)) if len(gains) > 1 else np.inf
    return float(np.mean(gains)) > SURE * error
