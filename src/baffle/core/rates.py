"""How the rate of a run changes from round to round: the share of it that a round has, a pure function of its number.

Everything is sums, products and quotients of float64 in a fixed order, because a library's cosine or power has other
last bits on another machine. The share is rounded to float32, and each step of the optimizer is multiplied by it.
"""

from collections.abc import Callable
from math import pi

Shares = Callable[[int, int, float], float]
"""Number of a round, rounds and factor of the schedule → the share of the rate, from 0 to 1."""

TERMS = 24  # of the cosine's series: the rest is below 1e-30


def warm_up(number: int, rounds: int, _factor: float) -> float:
    """Rises evenly, to all of the rate in the last of so many rounds."""
    return min(1.0, (number + 1) / rounds)


def cosine(number: int, rounds: int, factor: float) -> float:
    """Falls along half a cosine, to `factor` after so many rounds, and stays there."""
    return factor + (1.0 - factor) * (0.5 + 0.5 * cos(min(number, rounds) / rounds * pi))


def steps(number: int, rounds: int, factor: float) -> float:
    """Is multiplied by `factor` after every so many rounds."""
    share, power, times = 1.0, factor, number // rounds
    while times:
        share, power, times = share * power if times % 2 else share, power * power, times // 2
    return share


def cos(x: float) -> float:
    """The cosine of a number from 0 to π, by its series, from the smallest term up."""
    total = 1.0
    for term in range(TERMS, 0, -1):
        total = 1.0 - x * x / ((2 * term - 1) * (2 * term)) * total
    return total


SCHEDULES: dict[str, Shares] = {
    "constant": lambda _number, _rounds, _factor: 1.0,
    "warm-up": warm_up,
    "cosine": cosine,
    "steps": steps,
}
PARTS = {"constant": 1, "warm-up": 10, "cosine": 1, "steps": 3}
"""A plan that says nothing has a schedule for one in so many of its rounds."""
