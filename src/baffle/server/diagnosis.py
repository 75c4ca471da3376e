"""Warns when a run is unlikely to converge: once for each kind of sign, with the likely cause.

The signs are in what a server knows anyway: the loss, the scalars' sum, how many values were clipped, the step.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from baffle.core.arrays import F32, rms
from baffle.core.messages import Outcome
from baffle.core.ring import LOSS_MAX
from baffle.trajectory import Trajectory

Warn = Callable[[str], None]  # takes one line of advice
BLOCK = 10  # rounds are judged in blocks of this many
CLIMB = 0.2
"""The loss climbs if the means of two blocks in a row are above the best before them by this share of the first loss
..."""
SURE = 5.0
"""... and by this many standard errors, of the losses and of their logarithms."""
JUDGED, LEAST_JUDGED = 0.2, 4 * BLOCK
"""Whether the loss is flat is judged once, after this share of the run, and not before so many rounds."""
FELL = 2.0  # it is flat if it did not fall by this many standard errors
CLIPPED, CLIPPED_ROUNDS = 0.2, 5
"""A run clips if at least this share of its scalars was clipped in each of so many rounds in a row."""
ROUNDING = 0.3
"""σ is below the noise floor if a float32 step of the loss, divided by σ, is at least this share of a scalar."""
ONE_SIDED, LUCK = 0.5, 4.0
"""σ measures curvature if the scalars' mean is at least this share of their root mean square: half of the derivatives
along random directions are negative. A few scalars may lean to one side by luck, so those of recent rounds are taken
together, and their mean must be above this many standard errors ..."""
POOLED = round((LUCK / ONE_SIDED) ** 2)
"""... for which so many scalars are enough. Rounds with few scalars are remembered until there are as many."""
REACH = 0.02
"""A rate is too small if all steps of a run, in a straight line, would change weights by less than this share."""
EPSILON = float(np.finfo(np.float32).eps)


class Signs(NamedTuple):
    """What one round tells about σ and the rate. Scalars are missing if clients send vectors."""

    typical: float | None  # the root mean square of a scalar, in the mean over clients
    lean: float  # the scalars' mean as a share of it, with its sign
    directions: int  # how many directions these are along
    step: float  # how far the weights moved, as a share of their size


class Diagnosis:
    """Follows a run and warns about it."""

    def __init__(self, trajectory: Trajectory, records: Iterable[Mapping[str, Any]], warn: Warn) -> None:
        self._trajectory, self._warn = trajectory, warn
        self._losses = [float(record["loss"]) for record in records if record["loss"] is not None]
        self._clipped: list[float] = []
        self._signs: list[Signs] = []
        self._said: set[str] = set()
        self._weights: F32 | None = None

    def look(self, round_number: int, metrics: Mapping[str, Any], outcome: Outcome, weights: F32) -> None:
        """Take in a round that is over: its metrics, its outcome, and the weights after it. `round_number` counts from
        0, warnings count from 1."""
        before, self._weights = self._weights, weights
        if metrics["loss"] is None:
            if outcome.groups and not any(group.numbers().any() for group in outcome.groups):  # clients do not tell why
                self._say("zeros", f"all totals are zero in round {round_number + 1}: probably no loss is finite")
            return
        self._losses.append(float(metrics["loss"]))
        values = metrics["contributors"] * self._trajectory.length
        self._clipped.append(metrics["clipped"] / values if values else 0.0)
        if outcome.groups:
            self._signs.append(signs_of(self._trajectory, outcome, before, weights))
            self._signs = self._signs[-max(BLOCK, math.ceil(POOLED / self._trajectory.length)) :]
        self._look_for_clipping(metrics["contributors"])
        if len(self._losses) % BLOCK == 0:
            self._look_for_climbing(round_number)
            self._look_for_flatness(round_number)

    def _say(self, kind: str, words: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._warn(words)

    def _look_for_clipping(self, contributors: int) -> None:
        recent = self._clipped[-CLIPPED_ROUNDS:]
        if len(recent) < CLIPPED_ROUNDS or not min(recent) > 0:
            return
        silent = [share * contributors for share in recent]
        if all(count == round(count) for count in silent) and min(silent) < contributors:
            count = round(min(silent))
            self._say(
                "not finite",
                f"the losses of {count if count > 1 else 'one'} of {contributors} clients are not finite: probably NaN "
                "or infinite values in the data, or weights that have grown too large for some samples",
            )
        elif min(recent) >= CLIPPED:
            plan = self._trajectory.plan
            scalars = plan.outcome_kind == "scalars" or plan.federation.seeds == "own"
            bound = f"d_max = {plan.ring.d_max:g}" if scalars else f"update_max = {plan.ring.update_max:g}"
            climbed = self._too_large() if self._losses[-1] > 2 * abs(self._losses[0]) else ""
            # The size of clipped scalars is not known, only that it is at least the bound.
            why = self._rounding(plan.ring.d_max) or climbed or self._curvature()
            why = why or "set a larger bound, if the loss falls as it is"
            self._say("clipped", f"{float(np.mean(recent)):.0%} of all values are clipped at ring.{bound}: {why}")

    def _look_for_climbing(self, round_number: int) -> None:
        if climbs(self._losses):
            first, last = self._losses[0], blocks_of(self._losses)[-1]
            self._say(
                "climbs",
                f"the loss climbs: {shown(first)} in the first round, {shown(last)} in the last {BLOCK} up to "
                f"round {round_number + 1}; {self._rounding() or self._curvature() or self._too_large()}",
            )

    def _look_for_flatness(self, round_number: int) -> None:
        due = max(LEAST_JUDGED, JUDGED * self._trajectory.plan.rounds)
        if not due <= len(self._losses) < due + BLOCK:
            return
        means = blocks_of(self._losses)
        early, late = float(np.mean(means[:2])), float(np.mean(means[-2:]))
        if "climbs" not in self._said and early - late < FELL * error_of(self._losses):
            why = self._rounding() or self._curvature() or self._too_small()
            why = (
                why or "update.rate may be too small or too large, or the directions too few: `baffle tune` measures it"
            )
            self._say(
                "flat",
                f"the loss is flat: {shown(early)} in the first {2 * BLOCK} rounds, {shown(late)} in the last up to "
                f"round {round_number + 1}; {why}",
            )

    def _recent(self, name: str) -> float | None:
        values = [value for value in (getattr(signs, name) for signs in self._signs[-BLOCK:]) if value is not None]
        return float(np.median(values)) if values else None

    def _rounding(self, scalar: float = 0.0) -> str:
        """Whether σ is below the noise floor, if a scalar is this large (0: as it is typically)."""
        probe, typical = self._trajectory.plan.probe, self._recent("typical")
        grain = EPSILON * abs(self._losses[-1]) / probe.sigma
        if typical is None or grain < (scalar or ROUNDING * typical):
            return ""
        return (
            f"probe.sigma = {probe.sigma:g} is below the noise floor: a scalar is no more than the rounding of the "
            "loss; `baffle tune` finds one that works"
        )

    def _curvature(self) -> str:
        probe = self._trajectory.plan.probe
        if probe.scheme != "forward" or not one_sided(self._signs):
            return ""
        return (
            f"probe.sigma = {probe.sigma:g} is too large: scalars measure curvature, since most have one sign; "
            "`baffle tune` finds one that works"
        )

    def _too_large(self) -> str:
        rate = self._trajectory.plan.update.rate
        return f"update.rate = {rate:g} is probably too large; `baffle tune` finds one that works"

    def _too_small(self) -> str:
        step, plan = self._recent("step"), self._trajectory.plan
        if step is None or step * plan.rounds >= REACH:
            return ""
        return (
            f"update.rate = {plan.update.rate:g} is too small: {plan.rounds} rounds can change the weights by "
            f"{step * plan.rounds:.1g} of their size at most; `baffle tune` finds one that works"
        )


def signs_of(trajectory: Trajectory, outcome: Outcome, before: F32 | None, after: F32) -> Signs:
    """What a round tells about σ and the rate."""
    size = max(rms(after), 1e-30)
    step = rms(after - before) / size if before is not None else math.nan
    if outcome.kind != "scalars":
        return Signs(None, 0.0, 0, step)
    groups = [
        np.concatenate(
            [
                trajectory.means(trajectory.of_step(group.numbers(), number), group.weight)[0]
                for number in range(trajectory.steps_in(outcome.round))
            ]
        )
        for group in outcome.groups
    ]
    own = trajectory.plan.own_seeds  # else the groups' scalars are along the same directions, and lean together
    scalars = (np.concatenate(groups) if own else np.mean(groups, axis=0)).astype(np.float64)
    if not len(scalars):  # an exact head is all of the model
        return Signs(None, 0.0, 0, step)
    typical = rms(scalars)
    return Signs(typical, float(np.mean(scalars)) / typical if typical > 0 else 0.0, len(scalars), step)


def one_sided(recent: Sequence[Signs]) -> bool:
    """Whether the scalars of recent rounds lean to one side by more than luck."""
    count = sum(signs.directions for signs in recent)
    if not count:
        return False
    lean = abs(sum(signs.lean * signs.directions for signs in recent)) / count
    return lean >= max(ONE_SIDED, LUCK / math.sqrt(count))


def blocks_of(losses: list[float]) -> list[float]:
    """The means of all whole blocks."""
    return [float(np.mean(losses[end - BLOCK : end])) for end in range(BLOCK, len(losses) + 1, BLOCK)]


def error_of(losses: list[float]) -> float:
    """The standard error of a block's mean, from the differences of successive losses."""
    return float(np.median(np.abs(np.diff(losses)))) / (0.6745 * math.sqrt(2)) / math.sqrt(BLOCK)


def climbs(losses: list[float]) -> bool:
    """Whether the last two blocks are clearly above the first loss or the best block before them, or the last one is at
    least twice the first loss. Logarithms must agree with the former, where there are any: a few large losses among
    many small ones lift the mean of a block by luck."""
    logs: list[float] | None = np.log(losses).tolist() if 0 < min(losses) <= max(losses) < math.inf else None
    if logs is not None:  # a loss that has jumped scatters far more than the first one did
        least = max(math.log(2), SURE * error_of(logs) * math.sqrt(BLOCK))
        if blocks_of(logs)[-1] - logs[0] > least:
            return True
    return _rises(losses, CLIMB * abs(losses[0])) and (logs is None or _rises(logs, 0.0))


def _rises(losses: list[float], least: float) -> bool:
    """Whether each of the last two blocks is above what came before, by at least `least` and by more than chance. A
    single loss scatters more than a block's mean."""
    first, means, error = losses[0], blocks_of(losses), error_of(losses)
    last, before = means[-2:], means[:-2]
    if len(last) < 2 or not math.isfinite(sum(last)):
        return False
    if min(last) - first > max(least, SURE * error * math.sqrt(BLOCK)):
        return True
    return bool(before) and min(last) - min(before) > max(least, SURE * error * math.sqrt(2))


def shown(loss: float) -> str:
    """A loss in words. A client's loss is cut off at the ring's bound before it is sent."""
    return f"{LOSS_MAX:g} or more" if loss >= 0.999 * LOSS_MAX else f"{loss:.3f}"
