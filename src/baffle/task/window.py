"""Which steps σ measure a derivative: between the loss's rounding, below, and its curvature, above.

The same directions are probed at steps of many sizes. Where two neighbouring sizes agree best, the scalars are as near
to derivatives as this loss allows. A smaller step differs from them by rounding, a larger one by curvature. Nothing is
assumed about the runtime or its precision.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from baffle.core.arrays import F32, F64
from baffle.core.directions import Directions, Support
from baffle.core.probe import Loss, Scheme

TOLERANCE = 0.1
"""A step is in the window if its scalars differ from derivatives by at most this share. They are multiplied by random
directions, so that an error of this size adds a hundredth to the variance of an estimate."""

SMOOTH = 0.5
"""If no two neighbouring steps agree within this share, the loss has no derivative that a step could measure."""

STEPS = tuple(float(f"{10 ** (half / 2):.3g}") for half in range(-12, 1))
"""From 1e-6 to 1, two a decade. Smaller steps are lost when they are added to float32 weights."""


@dataclass(frozen=True)
class Window:
    """The least and the largest step that measure a derivative, and the root mean square of a scalar there. For a loss
    without derivatives, `smooth` is false and the bounds mean nothing."""

    low: float
    high: float
    typical: float
    smooth: bool = True
    errors: Mapping[float, float] = field(default_factory=dict)
    """For every step that was tried, how far its scalars are from derivatives, as a share of them."""

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)

    def meet(self, other: "Window") -> "Window":
        """The steps that are in both windows. If none is, the two bounds that are nearest to each other."""
        if not (self.smooth and other.smooth):
            return self if self.smooth else other
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Window(min(low, high), max(low, high), other.typical)


def find_window(
    loss: Loss,
    weights: F32,
    scheme: Scheme,
    directions: Directions,
    supports: Sequence[Support],
    steps: Sequence[float] = STEPS,
) -> Window:
    """Probe a loss at steps of many sizes, along the same directions."""
    with np.errstate(all="ignore"):  # far from the weights a loss may not be finite
        scalars = [scheme(loss, weights, directions, supports, sigma).scalars for sigma in steps]
        best, derivatives = _derivatives(scalars)
        if best is None:
            return Window(steps[0], steps[-1], rms(scalars[-1]), smooth=False)
        typical = rms(derivatives)
        errors = [rms(found - derivatives) / typical for found in scalars]
    fits = [error <= TOLERANCE for error in errors]
    low, high = best, best + 1
    while low > 0 and fits[low - 1]:
        low -= 1
    while high < len(steps) - 1 and fits[high + 1]:
        high += 1
    return Window(steps[low], steps[high], typical, errors=dict(zip(steps, errors, strict=True)))


def _derivatives(scalars: Sequence[F64]) -> tuple[int | None, F64]:
    """The first of the two neighbouring steps that agree best, and the mean of their scalars. A loss that does not
    change at all agrees with itself and says nothing."""
    disagreements = []
    for near, far in pairwise(scalars):
        size = min(rms(near), rms(far))
        difference = rms(far - near)
        disagreements.append(difference / size if size > 0 and math.isfinite(difference) else math.inf)
    best = int(np.argmin(disagreements))
    if disagreements[best] > SMOOTH:
        return None, scalars[best]
    return best, (scalars[best] + scalars[best + 1]) / 2


def rms(values: F64) -> float:
    return float(np.sqrt(np.mean(values**2)))
